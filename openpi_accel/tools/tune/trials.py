"""One setting, measured in a process of its own; every outcome is a line of a file, so that a search can go on."""

import dataclasses
import json
import pathlib
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from openpi_accel.tools.tune.space import Point

# The exit code of a mistake that can be mended: here a step that needs more memory than there is.
_REFUSED = 2
_OUT_OF_TIME = "the time was over before it was measured"
_NOTHING: dict[str, Any] = {"samples_per_s": None, "step_s": None, "peak_gib": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """An outcome.

    Attributes:
        point: what was tried.
        predicted_gib: what it was thought to need on a device; None where nothing was predicted.
        samples_per_s: of all devices; None where it did not run.
        step_s, peak_gib: likewise; peak_gib is None where the device does not tell.
        reason: why it did not run.
        wall_s: of the whole trial.
    """

    point: Point
    predicted_gib: float | None
    samples_per_s: float | None
    step_s: float | None
    peak_gib: float | None
    reason: str | None
    wall_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """How trials are run and where they are written down.

    Attributes:
        command: of the benchmark, with the options that all have in common.
        environment: of the processes; a setting's own switches come on top.
        num_devices: of this machine.
        key: what an outcome is good for: config, options, device, code.
        file: JSON lines.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    num_devices: int
    key: Mapping[str, Any]
    file: pathlib.Path

    def known(self) -> dict[Point, Trial]:
        """What was found earlier under the same key; a line that a killed search left unfinished is passed over."""
        found: dict[Point, Trial] = {}
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["key"] == dict(self.key):
                point = Point(**row["trial"].pop("point"))
                found[point] = Trial(point=point, **row["trial"])
        return found

    def run(self, point: Point, predicted_gib: float | None, timeout_s: float) -> Trial:
        """Measures a setting and writes it down. A trial that ran out of time is not written: it says nothing about the
        setting."""
        started_s = time.monotonic()
        outcome = self._measure(point, timeout_s)
        trial = Trial(point=point, predicted_gib=predicted_gib, wall_s=time.monotonic() - started_s, **outcome)
        if trial.reason != _OUT_OF_TIME:
            self._write(trial)
        return trial

    def refuse(self, point: Point, predicted_gib: float | None, reason: str) -> Trial:
        """Writes down that a setting was not even tried."""
        trial = Trial(point=point, predicted_gib=predicted_gib, wall_s=0.0, **_NOTHING, reason=reason)
        self._write(trial)
        return trial

    def _write(self, trial: Trial) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        torn = self.file.exists() and not self.file.read_bytes().endswith(b"\n")  # by a kill in the middle of a line
        with self.file.open("a") as file:
            file.write("\n" * torn + json.dumps({"key": dict(self.key), "trial": dataclasses.asdict(trial)}) + "\n")

    def _measure(self, point: Point, timeout_s: float) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [*self.command, *point.arguments(self.num_devices)],
                env={**self.environment, **point.environment},
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return _NOTHING | {"reason": _OUT_OF_TIME}
        lines = done.stdout.splitlines()
        if done.returncode == _REFUSED:
            return _NOTHING | {"reason": _last_line(done.stderr)}
        if done.returncode != 0 or not lines:
            return _NOTHING | {"reason": f"exit code {done.returncode}: {_last_line(done.stderr)}"}
        result = json.loads(lines[-1])
        return {
            "samples_per_s": result["samples_per_s"],
            "step_s": result["step_s"],
            "peak_gib": result["peak_memory_gib"],
            "reason": None,
        }


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["without a word"])[-1].removeprefix("error: ")[:300]
