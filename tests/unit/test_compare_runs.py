"""Comparing two runs: alignment, bounds, equality, what is missing; the report parsed, and opened in a browser."""

import base64
import html.parser
import io
import json
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from openpi_accel.errors import UserError
from openpi_accel.tools.compare.command import main
from openpi_accel.tools.compare.runs import read_run, windows
from openpi_accel.tools.compare.verdict import Bounds, Comparison, compare
from tests.conftest import find_browser

Row = dict[str, Any]


def row(step: int, loss: float, **further: Any) -> Row:
    return {
        "step": step,
        "loss": loss,
        "grad_norm": 2 * loss,
        "param_norm": 3.0,
        "learning_rate": 1e-3 / (1 + step),
        "samples_per_s": 40.0,
        "step_s": 0.4,
        "data_wait_share": 0.25,
        "host_memory_peak_gib": 1.5,
        "sample_ids_hash": f"{step:016x}",
    } | further


def rows_of(losses: Sequence[float]) -> list[Row]:
    return [row(step, loss) for step, loss in enumerate(losses)]


def write_run(folder: pathlib.Path, rows: Sequence[Row], config: Any = None) -> pathlib.Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def compared(a: pathlib.Path, b: pathlib.Path, control: pathlib.Path | None = None, **bounds: Any) -> Comparison:
    return compare(read_run(a), read_run(b), Bounds(**bounds), None if control is None else read_run(control))


def failed(comparison: Comparison) -> list[str]:
    return [check.name for check in comparison.checks if not check.passed]


def test_the_bounds_of_the_loss(tmp_path: pathlib.Path) -> None:
    a = write_run(tmp_path / "a", rows_of([1.0, 0.5, 0.25]))
    b = write_run(tmp_path / "b", rows_of([1.0, 0.5003, 0.25]))
    result = compared(a, b)
    loss = result.distance.differences["loss"]
    assert loss.mean == pytest.approx(1e-4) and loss.largest == pytest.approx(3e-4)
    assert (loss.largest_at, loss.first_unequal) == (1, 1)
    assert loss.largest_relative == pytest.approx(3e-4 / 0.5003)
    assert failed(compared(a, b, mean_difference=2e-4)) == []
    assert failed(compared(a, b, mean_difference=5e-5)) == ["mean loss difference"]
    assert failed(compared(a, b, mean_difference=2e-4, late_difference=5e-5)) == ["late-window difference"]


def test_the_late_window_is_the_last_tenth(tmp_path: pathlib.Path) -> None:
    losses = np.linspace(2, 1, 200)
    a = write_run(tmp_path / "a", rows_of(losses.tolist()))
    b = write_run(tmp_path / "b", rows_of((losses + np.where(np.arange(200) >= 180, 5e-3, 0)).tolist()))
    late = compared(a, b).distance.late
    assert late.steps == (180, 199) and late.difference == pytest.approx(5e-3)
    assert late.losses[0] == pytest.approx(losses[180:].mean())


def test_learning_rate_and_batches_are_held_to_the_bit(tmp_path: pathlib.Path) -> None:
    rows = rows_of([1.0, 0.5, 0.25])
    a = write_run(tmp_path / "a", rows)
    other = [rows[0], rows[1] | {"learning_rate": float(np.nextafter(rows[1]["learning_rate"], 1))}, rows[2]]
    result = compared(a, write_run(tmp_path / "b", other))
    assert failed(result) == ["learning rate"] and "first at 1" in result.checks[1].text
    result = compared(a, write_run(tmp_path / "c", [*rows[:2], rows[2] | {"sample_ids_hash": "f"}]))
    assert failed(result) == ["batches"]
    result = compared(
        a, write_run(tmp_path / "d", [{k: v for k, v in r.items() if k != "sample_ids_hash"} for r in rows])
    )
    assert result.passed and "same batches is not known" in result.notes[0]
    result = compared(
        a, write_run(tmp_path / "e", [{k: v for k, v in r.items() if k != "learning_rate"} for r in rows])
    )
    assert failed(result) == ["learning rate"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_fails_and_is_named(tmp_path: pathlib.Path, value: float) -> None:
    a = write_run(tmp_path / "a", rows_of([1.0, 0.5, 0.25]))
    b = write_run(tmp_path / "b", rows_of([1.0, value, 0.25]))
    result = compared(a, b)
    assert "finite" in failed(result) and "B has NaN or infinity at step 1" in result.checks[0].text
    assert result.distance.differences["loss"].mean == 0  # over the finite pairs
    assert "finite" in failed(compared(b, b, equal=True))
    nothing = write_run(tmp_path / "c", rows_of([value] * 3))
    assert set(failed(compared(a, nothing))) == {"finite", "mean loss difference", "late-window difference"}


def test_different_intervals_are_compared_over_the_same_steps(tmp_path: pathlib.Path) -> None:
    losses = np.random.default_rng(0).uniform(1, 2, 31)
    a = write_run(tmp_path / "a", rows_of(losses.tolist()))
    means = [losses[0], *(losses[i + 1 : i + 4].mean() for i in range(0, 30, 3))]
    b = write_run(tmp_path / "b", [row(3 * i, float(mean)) for i, mean in enumerate(means)])
    loss = compared(a, b).distance.differences["loss"]
    assert loss.largest is not None and loss.largest < 1e-12
    assert "B has no row for 20 steps" in compared(a, b).notes[0]
    assert "same steps" in failed(compared(a, b, equal=True))
    assert failed(compared(a, b, relative=1e-9)) == []
    # 2 and 3 meet at every sixth step.
    c = write_run(
        tmp_path / "c", [row(0, losses[0]), *(row(i, float(losses[i - 1 : i + 1].mean())) for i in range(2, 31, 2))]
    )
    result = compared(b, c)
    assert [w.step for w in result.distance.alignment.windows] == [0, 6, 12, 18, 24, 30]
    assert result.distance.differences["loss"].largest == pytest.approx(0, abs=1e-12)


def test_a_resumed_run_counts_as_it_went_on(tmp_path: pathlib.Path) -> None:
    straight = write_run(tmp_path / "a", rows_of([1.0, 0.9, 0.8, 0.7, 0.6]))
    held_out = {"step": 3, "val_loss": 0.5}
    again = [
        *rows_of([1.0, 0.9, 5.0, 5.0]),
        held_out | {"val_loss": 9.0},
        *rows_of([1.0, 0.9, 0.8, 0.7])[2:],
        held_out,
        row(4, 0.6),
    ]
    resumed = write_run(tmp_path / "b", again)
    result = compared(straight, resumed, equal=True)
    assert result.passed and "B: 2 rows were written again" in result.notes[0]
    assert result.b.held_out == {3: 0.5}


def test_runs_of_different_length(tmp_path: pathlib.Path) -> None:
    a = write_run(tmp_path / "a", rows_of([1.0, 0.9, 0.8, 0.7]))
    b = write_run(tmp_path / "b", rows_of([1.0, 0.9]))
    result = compared(a, b)
    assert result.passed and result.notes[0] == "A ends at step 3, B at 1: compared as far as B goes"
    assert failed(compared(a, b, equal=True)) == ["same steps"]
    assert failed(compared(a, b, relative=0.1)) == ["complete"]


def test_lost_rows_are_not_taken_for_a_longer_mean(tmp_path: pathlib.Path) -> None:
    rows = rows_of([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    a, b = write_run(tmp_path / "a", rows), write_run(tmp_path / "b", [*rows[:2], *rows[4:]])
    result = compared(a, b)
    assert [w.step for w in result.distance.alignment.windows] == [0, 1, 5]
    assert any("left out" in note and note.endswith(": 4") for note in result.notes)
    late_start = write_run(tmp_path / "c", rows[2:])
    assert [w.step for w in compared(a, late_start).distance.alignment.windows] == [3, 4, 5]
    # Rows whose interval changed on resuming are no lost rows.
    changed = write_run(tmp_path / "d", [row(step, 1.0) for step in (0, 2, 4, 6, 9, 12)])
    assert None not in windows(read_run(changed)).values()


def test_equality_is_of_bits(tmp_path: pathlib.Path) -> None:
    rows = rows_of([1.0, 0.5, 0.25])
    a = write_run(tmp_path / "a", rows)
    assert compared(a, write_run(tmp_path / "b", rows), equal=True).passed
    for key in ("loss", "grad_norm", "param_norm"):
        other = [*rows[:2], rows[2] | {key: float(np.nextafter(rows[2][key], 9))}]
        result = compared(a, write_run(tmp_path / key, other), equal=True)
        assert failed(result) == [f"{key} equal"]
        assert [check.text for check in result.checks if not check.passed] == ["differs first at step 2"]
        assert failed(compared(a, tmp_path / key, relative=1e-12)) == []
        assert failed(compared(a, tmp_path / key, relative=1e-18)) == [f"{key} within --rtol"]


def test_a_control_says_how_far_rounding_goes(tmp_path: pathlib.Path) -> None:
    a = write_run(tmp_path / "a", rows_of([1.0, 0.5, 0.25]))
    b = write_run(tmp_path / "b", rows_of([1.0, 0.501, 0.251]))
    near = write_run(tmp_path / "near", rows_of([1.0, 0.5001, 0.25]))
    far = write_run(tmp_path / "far", rows_of([1.0, 0.499, 0.251]))
    # The bound is said to be missed whatever the control does.
    assert failed(compared(a, b, control=far)) == ["mean loss difference"]
    assert failed(compared(a, b, control=near)) == ["mean loss difference", "within the control"]
    assert "1.00 times as far" in compared(a, b, control=far).checks[-1].text


def test_runs_that_cannot_be_compared(tmp_path: pathlib.Path) -> None:
    a = write_run(tmp_path / "a", [row(1, 1.0), row(3, 1.0)])
    b = write_run(tmp_path / "b", [row(0, 1.0), row(2, 1.0)])
    with pytest.raises(UserError, match="none is in both"):
        compared(a, b)
    with pytest.raises(UserError, match="is not there"):
        compared(a, tmp_path)
    with pytest.raises(UserError, match="holds no step with a loss"):
        compared(a, write_run(tmp_path / "c", [{"step": 1, "val_loss": 1.0}]))
    with pytest.raises(UserError, match="nothing can be compared"):
        compared(write_run(tmp_path / "d", [row(3, 1.0)]), write_run(tmp_path / "e", [row(3, 1.0)]))
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text"):
        compared(a, tmp_path / "f")


@pytest.fixture
def runs(tmp_path: pathlib.Path) -> tuple[str, str, str]:
    """Two runs and a control with settings, a name that must be escaped, and held-out losses."""
    losses = np.exp(-np.linspace(0, 2, 60))
    noise = np.random.default_rng(0).normal(0, 1e-3, (2, 60))
    a = [*rows_of(losses.tolist()), {"step": 30, "val_loss": 0.4}]
    b = [r | {"samples_per_s": 60.0, "step_s": 0.25} for r in rows_of((losses + noise[0]).tolist())]
    config = {"seed": 42, "model": {"dtype": "float32", "name": "<b>&"}, "exp_name": "a"}
    return (
        str(write_run(tmp_path / "a", a, config)),
        str(write_run(tmp_path / "<b>", b, config | {"model": {"dtype": "float32", "name": "x"}, "exp_name": "b"})),
        str(write_run(tmp_path / "control", rows_of((losses + noise[1]).tolist()))),
    )


class Page(html.parser.HTMLParser):
    """What a page holds and refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.images: list[bytes] = []
        self.headings: list[str] = []
        self.tags: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = tag
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data", "poster"):
                self.references.append(value or "")
        if tag == "img":
            values = dict(attrs)
            assert values["alt"]
            head, _, data = (values["src"] or "").partition(",")
            assert head == "data:image/png;base64"
            self.images.append(base64.b64decode(data, validate=True))

    def handle_data(self, data: str) -> None:
        if self._inside in ("h1", "h2", "h3") and data.strip():
            self.headings.append(data)


def test_the_report_is_one_file_with_everything_in_it(
    runs: tuple[str, str, str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, control = runs
    out, plots = tmp_path / "out" / "report.html", tmp_path / "plots"
    assert main([a, b, "--control", control, "--html", str(out), "--plots", str(plots)]) == 1  # 1e-3 is over 1e-4
    shown = capsys.readouterr().out
    assert "FAILED  mean loss difference" in shown and "holds   within the control" in shown and str(out) in shown
    text = out.read_text()
    page = Page(text)
    assert "http://" not in text and "https://" not in text and "url(" not in text and "script" not in page.tags
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    names = {"loss", "loss_difference", "learning_rate", "grad_norm", "param_norm", "samples_per_s", "data_wait_share"}
    assert {path.stem for path in plots.iterdir()} == names | {"host_memory_peak_gib"}
    assert sorted(page.images) == sorted(path.read_bytes() for path in plots.iterdir())
    for data in page.images:
        with Image.open(io.BytesIO(data)) as image:
            assert image.width > 600 and len(image.convert("RGB").getcolors(2**20) or []) > 20
    for heading in ("Verdict", "Figures", "Differences", "Curves", "Settings that differ", "Throughput", "Host memory"):
        assert heading in page.headings
    assert "b" not in page.tags and "model.name" in text and "seed" not in text and "exp_name" not in text
    assert "60.00" in text and "samples/s" in text and "GiB" in text
    assert text.index("Not within the bounds") < text.index("<h2>Figures")
    assert len(text) < 2 << 20


def test_json_and_exit_codes(
    runs: tuple[str, str, str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, _ = runs
    assert main([a, a, "--assert-equal", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    assert main([a, b, "--assert-equal"]) == 1
    assert main([a, b, "--rtol", "0.1"]) == 0
    capsys.readouterr()
    nan = write_run(tmp_path / "nan", rows_of([float("nan")] * 60))
    assert main([a, str(nan), "--json"]) == 1
    text = capsys.readouterr().out
    assert "NaN" not in text.replace("NaN or infinity", "") and json.loads(text)["differences"]["loss"]["mean"] is None


@pytest.mark.browser
def test_a_browser_shows_the_report(runs: tuple[str, str, str], tmp_path: pathlib.Path) -> None:
    a, b, _ = runs
    out, picture = tmp_path / "report.html", tmp_path / "picture.png"
    main([a, b, "--html", str(out)])
    browse(tmp_path, f"--screenshot={picture}", "--window-size=1200,2400", out.as_uri())
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape[:2] == (2400, 1200)
    banner = (pixels == (0xFD, 0xEA, 0xEA)).all(axis=-1)  # the failed verdict, over most of the width near the top
    assert banner[:400].sum() > 800 * 30
    assert ((pixels == (0x1F, 0x5F, 0xA8)).all(axis=-1)).sum() > 100  # curves are drawn

    # The page itself forbids scripts, so a copy without that line tells what the browser made of it.
    script = (
        "<script>addEventListener('load', () => { document.body.innerHTML = '<pre>' + JSON.stringify({"
        "widths: [...document.images].map(i => i.naturalWidth), scroll: document.documentElement.scrollWidth,"
        "fetched: performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('data:'))"
        "}) + '</pre>'; });</script></body>"
    )
    policy = next(line for line in out.read_text().splitlines() if "Content-Security-Policy" in line)
    copy = tmp_path / "copy.html"
    copy.write_text(out.read_text().replace(policy, "").replace("</body>", script))
    dom = browse(tmp_path, "--dump-dom", "--window-size=1200,2400", copy.as_uri())
    seen = json.loads(dom.partition("<pre>")[2].partition("</pre>")[0])
    assert len(seen["widths"]) == 8 and min(seen["widths"]) > 600
    assert seen["fetched"] == [] and seen["scroll"] <= 1200


def browse(folder: pathlib.Path, *options: str) -> str:
    """What headless Chromium prints."""
    browser = find_browser()
    assert browser is not None
    fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
    quiet = (
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
    )
    done = subprocess.run([browser, *fixed, *quiet, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
