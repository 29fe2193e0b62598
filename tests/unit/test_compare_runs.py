"""Comparing two runs: the bound, the learning rate, other steps, no metrics."""

import json
import pathlib

import pytest

from openpi_accel.errors import UserError
from openpi_accel.tools.compare_runs import compare_runs


def write_run(folder: pathlib.Path, losses: list[float], learning_rate: float = 1e-3) -> pathlib.Path:
    folder.mkdir()
    rows = [{"step": step, "loss": loss, "learning_rate": learning_rate} for step, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_mean_difference_and_learning_rate(tmp_path: pathlib.Path) -> None:
    a = write_run(tmp_path / "a", [1.0, 0.5, 0.25])
    b = write_run(tmp_path / "b", [1.0, 0.5003, 0.25])
    c = write_run(tmp_path / "c", [1.0, 0.5, 0.25], learning_rate=1.0000001e-3)
    d = write_run(tmp_path / "d", [1.0, float("nan"), 0.25])
    result = compare_runs(a, b)
    assert result.mean_difference == pytest.approx(1e-4) and result.max_difference == pytest.approx(3e-4)
    assert not result.failures(2e-4) and "mean loss difference" in result.failures(5e-5)[0]
    assert compare_runs(a, c).failures(1e-4) == ["the learning rates differ"]
    assert compare_runs(a, d).failures(1e-4)


def test_runs_that_cannot_be_compared(tmp_path: pathlib.Path) -> None:
    a, b = write_run(tmp_path / "a", [1.0, 0.5]), write_run(tmp_path / "b", [1.0])
    with pytest.raises(UserError, match="the same --num-train-steps"):
        compare_runs(a, b)
    with pytest.raises(UserError, match="holds no step"):
        compare_runs(a, tmp_path)
