"""One self-contained page about two runs: the verdict on top, then figures, pictures and settings."""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from openpi_accel.tools.compare.plots import Plot
from openpi_accel.tools.compare.verdict import WITHIN_CONTROL, Comparison, largest, median

# The browser itself refuses anything from outside.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1f23; background: #fff; margin: 0 auto; padding: 24px;
  max-width: 1120px; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 32px 0 8px; border-bottom: 1px solid #dfe3e8; padding-bottom: 4px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid #eceff2; vertical-align: top;
  overflow-wrap: anywhere; }
th { font-weight: 600; color: #4a525c; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font-size: 13px; }
.verdict { padding: 12px 16px; border-radius: 6px; margin: 16px 0; font-weight: 600; }
.pass { background: #e5f4e9; color: #14532d; } .fail { background: #fdeaea; color: #8c1d18; }
td.pass, td.fail { background: none; font-weight: 600; white-space: nowrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 16px; }
figure { margin: 0; } figure img { width: 100%; height: auto; } figcaption { color: #4a525c; font-size: 13px; }
.quiet { color: #4a525c; }
"""
Row = tuple[str, str, str, str]
"""(what, A, B, unit)."""


def html_report(comparison: Comparison, plots: Iterable[Plot]) -> str:
    """The page as text; it needs no network and no other file."""
    failed = [check for check in comparison.checks if not check.passed]
    summary = "The runs agree." if not failed else f"Not within the bounds: {', '.join(c.name for c in failed)}."
    if failed and any(check.name == WITHIN_CONTROL and check.passed for check in comparison.checks):
        summary += " The losses are no further apart than rounding alone drives this run."
    control = "" if comparison.control is None else _run_line("control", str(comparison.control.path))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Comparison of two runs</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Comparison of two runs</h1>
{_run_line("A", str(comparison.a.path))}
{_run_line("B", str(comparison.b.path))}
{control}
<div class="verdict {"fail" if failed else "pass"}">{escape(summary)}</div>
<h2>Verdict</h2>
{_table(("check", "", "measured"), map(_check_row, comparison.checks))}
{_notes(comparison.notes)}
<h2>Figures</h2>
{_table(("figure", "A", "B", "unit"), map(_figure_row, figures(comparison)))}
<h2>Differences</h2>
{
        _table(
            ("figure", "mean |A - B|", "largest", "at step", "largest relative", "first unequal step"),
            _difference_rows(comparison),
        )
    }
<h2>Curves</h2>
<div class="plots">
{"".join(map(_plot, plots))}
</div>
<h2>Settings that differ</h2>
{_settings(comparison)}
</body>
</html>
"""


def figures(comparison: Comparison) -> Iterator[Row]:
    """Yields the summary figures of both runs; a dash where a run did not log one."""
    a, b = comparison.a, comparison.b
    yield ("logged rows", str(len(a.steps)), str(len(b.steps)), "")
    yield ("last step", str(a.steps[-1]), str(b.steps[-1]), "")
    yield ("first loss", f"{a.rows[a.steps[0]]['loss']:.6f}", f"{b.rows[b.steps[0]]['loss']:.6f}", "")
    yield ("last loss", f"{a.rows[a.steps[-1]]['loss']:.6f}", f"{b.rows[b.steps[-1]]['loss']:.6f}", "")
    late = comparison.distance.late
    what = f"mean loss, steps {late.steps[0]} to {late.steps[1]}"
    yield (what, f"{late.losses[0]:.6f}", f"{late.losses[1]:.6f}", "")
    for what, key, pick, scale, digits, unit in (
        ("throughput, median", "samples_per_s", median, 1, 2, "samples/s"),
        ("step, median", "step_s", median, 1e3, 1, "ms"),
        ("devices waiting for data, median", "data_wait_share", median, 100, 1, "%"),
        ("device memory, highest", "device_memory_peak_gib", largest, 1, 2, "GiB"),
        ("host memory, highest", "host_memory_peak_gib", largest, 1, 2, "GiB"),
    ):
        values = [pick(run, key) for run in (a, b)]
        if any(value is not None for value in values):
            shown = ["-" if value is None else f"{scale * value:.{digits}f}" for value in values]
            yield (what, shown[0], shown[1], unit)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The same as plain values; what is not finite is None."""
    distance, control = comparison.distance, comparison.control_distance
    return {
        "a": str(comparison.a.path),
        "b": str(comparison.b.path),
        "passed": comparison.passed,
        "checks": [{"name": c.name, "passed": c.passed, "text": c.text} for c in comparison.checks],
        "notes": list(comparison.notes),
        "num_rows": len(distance.alignment.windows),
        "first_step": distance.alignment.windows[0].step,
        "last_step": distance.alignment.windows[-1].step,
        "differences": {name: vars(difference) for name, difference in distance.differences.items()},
        "late_window": {
            "steps": list(distance.late.steps),
            "losses": [_finite(loss) for loss in distance.late.losses],
            "difference": _finite(distance.late.difference),
        },
        "control": None
        if comparison.control is None or control is None
        else {
            "path": str(comparison.control.path),
            "differences": {n: vars(d) for n, d in control.differences.items()},
        },
        "figures": {what: {"a": a, "b": b, "unit": unit} for what, a, b, unit in figures(comparison)},
        "settings": {name: list(pair) for name, pair in comparison.settings.items()},
    }


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _run_line(label: str, path: str) -> str:
    return f'<div class="quiet">{label}: <code>{escape(path)}</code></div>'


def _check_row(check: Any) -> list[str]:
    word, style = ("holds", "pass") if check.passed else ("FAILED", "fail")
    return [f"<td>{escape(check.name)}</td>", f'<td class="{style}">{word}</td>', f"<td>{escape(check.text)}</td>"]


def _figure_row(row: Row) -> list[str]:
    what, a, b, unit = map(escape, row)
    return [f"<td>{what}</td>", _numeric(a), _numeric(b), f"<td>{unit}</td>"]


def _difference_rows(comparison: Comparison) -> Iterator[list[str]]:
    for name, difference in comparison.distance.differences.items():
        measured = (difference.mean, difference.largest)
        first = "none" if difference.first_unequal is None else str(difference.first_unequal)
        yield [
            f"<td>{escape(name)}</td>",
            *(_numeric("-" if value is None else f"{value:.3e}") for value in measured),
            _numeric("-" if difference.largest_at is None else str(difference.largest_at)),
            _numeric("-" if difference.largest_relative is None else f"{difference.largest_relative:.3e}"),
            _numeric(first),
        ]


def _numeric(text: str) -> str:
    return f'<td class="number">{text}</td>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<ul>{items}</ul>" if items else ""


def _plot(plot: Plot) -> str:
    data = base64.b64encode(plot.png).decode()
    return (
        f'<figure><h3>{escape(plot.title)}</h3><img alt="{escape(plot.title)} over the steps" '
        f'src="data:image/png;base64,{data}"><figcaption>{escape(plot.caption)}</figcaption></figure>\n'
    )


def _settings(comparison: Comparison) -> str:
    if not comparison.a.settings or not comparison.b.settings:
        return '<p class="quiet">A run without config.json: its settings are not known.</p>'
    if not comparison.settings:
        return '<p class="quiet">None: both runs have the same config.json and environment.json.</p>'
    return _table(("setting", "A", "B"), _setting_rows(comparison.settings))


def _setting_rows(settings: Mapping[str, tuple[Any, Any]]) -> Iterator[list[str]]:
    for name, pair in settings.items():
        values = (f"<td><code>{escape(json.dumps(value))}</code></td>" for value in pair)
        yield [f"<td><code>{escape(name)}</code></td>", *values]
