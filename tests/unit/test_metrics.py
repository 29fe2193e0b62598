"""What a run writes about itself, and that no tracker can stop it."""

import builtins
import io
import json
import pathlib
import re
import sys
import types
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event

from openpi_accel.train.metrics import MetricsWriter, WandbSettings, hash_sample_ids, read_rows
from openpi_accel.train.progress import ProgressReport

SETTINGS = WandbSettings(project="p", name="n", config={"a": 1})


def row(step: int, loss: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "grad_norm": 2.0, "sample_ids_hash": "0f"}


def test_rows_and_tensorboard(tmp_path: pathlib.Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(row(0, 0.1))
    assert read_rows(tmp_path / "metrics.jsonl") == [row(0, 0.1)]  # at once, for those who look on
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    content, tags = events.read_bytes(), {}
    while content:  # a record: length (8 bytes), its checksum (4), the event, its checksum (4)
        length = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + length])
        tags |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        content = content[16 + length :]
    assert tags["loss"] == (0, pytest.approx(0.1))
    assert tags["grad_norm"] == (0, 2.0)


def test_resuming_drops_later_rows_and_a_torn_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row(step)) + "\n" for step in (0, 10, 20, 30)) + '{"step": 40, "lo')
    writer = MetricsWriter(tmp_path, resume_step=16)
    writer.write(row(20, 5.0))
    writer.close()
    assert read_rows(path) == [row(0), row(10), row(20, 5.0)]
    assert not list(tmp_path.glob(".*"))


def test_other_processes_write_nothing(tmp_path: pathlib.Path) -> None:
    writer = MetricsWriter(tmp_path, enabled=False)
    writer.write(row(0))
    writer.save_images({"camera": np.zeros((1, 4, 4, 3), np.uint8)})
    writer.save_loss_curve()
    writer.close()
    assert not list(tmp_path.iterdir())


def test_pictures(tmp_path: pathlib.Path) -> None:
    writer = MetricsWriter(tmp_path)
    images = {name: np.full((3, 6, 5, 3), shade, np.uint8) for name, shade in (("base", 10), ("wrist", 200))}
    images["base"][2] = 99
    writer.save_images(images, ["row 3: episode 0 frame 3\nlift"] * 3)
    picture = np.asarray(Image.open(tmp_path / "first_batch.png"))
    assert picture.shape[1:] == (3 * 5, 3)
    assert (picture[-6:] == 200).all() and (picture == 99).all(axis=-1).sum() == 6 * 5
    writer.save_loss_curve()
    assert not (tmp_path / "loss_curve.png").exists()  # nothing to draw yet
    for step in range(3):
        writer.write(row(step, 1.0 / (step + 1)))
    writer.save_loss_curve()
    writer.close()
    assert np.asarray(Image.open(tmp_path / "loss_curve.png").convert("L")).std() > 1


def test_hash_tells_order_and_ids_apart() -> None:
    ids = np.array([3, 1, 2])
    assert hash_sample_ids(ids) == hash_sample_ids(ids.astype(np.int32)) == hash_sample_ids(np.array([3, 1, 2]))
    assert len({hash_sample_ids(np.array(x)) for x in ([3, 1, 2], [1, 2, 3], [3, 1])}) == 3


def test_missing_wandb_is_a_warning(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_wandb(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    with pytest.warns(UserWarning, match="Weights & Biases is off: No module named 'wandb'"):
        writer = MetricsWriter(tmp_path, wandb=SETTINGS)
    writer.write(row(0))
    writer.close()
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1


class FakeRun:
    """As much of a Weights & Biases run as we use; `log` fails from the second row on."""

    id = "abc"

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self.rows:
            raise ConnectionError("no route to host")
        self.rows.append((step, numbers))

    def finish(self) -> None:
        raise ConnectionError("no route to host")


def test_wandb_that_fails_later_is_a_warning(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun()
    calls: list[dict[str, Any]] = []
    fake = types.SimpleNamespace(init=lambda **kwargs: calls.append(kwargs) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    writer = MetricsWriter(tmp_path, wandb=SETTINGS)
    assert (tmp_path / "wandb_id.txt").read_text() == "abc"
    writer.write(row(0))
    assert run.rows == [(0, {"loss": 1.0, "grad_norm": 2.0})]
    with pytest.warns(UserWarning, match="failed and is off from here on"):
        writer.write(row(1))
    writer.write(row(2))
    writer.close()
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 3

    # The id is taken up on resume, and a lost id file is no error (a fresh id is made).
    with pytest.warns(UserWarning, match="could not finish"):
        MetricsWriter(tmp_path, resume_step=3, wandb=SETTINGS).close()
    (tmp_path / "wandb_id.txt").unlink()
    with pytest.warns(UserWarning, match="could not finish"):
        MetricsWriter(tmp_path, resume_step=3, wandb=SETTINGS).close()
    assert [call["id"] for call in calls] == [None, "abc", None]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_shows_loss_speed_wait_and_time_left(stream: io.StringIO) -> None:
    report = ProgressReport(1001, 0, stream)
    report.advance(99)
    report.show(
        {"step": 100, "loss": 0.5, "grad_norm": 2.0, "samples_per_s": 64.0, "step_s": 4.0, "data_wait_share": 0.25}
    )
    report.close()
    text = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    expected = ["100/1001", "loss 0.5000", "64.0 samples/s", "data wait 25 %", "ETA 1:00:00"]
    assert [part for part in expected if part not in " ".join(text.split())] == []
