"""Reads what a run has left: its log, its config, and where it ran."""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from openpi_accel.config.serialize import CONFIG_FILE, ENVIRONMENT_FILE
from openpi_accel.errors import UserError
from openpi_accel.train.metrics import METRICS_FILE, read_rows

# The mean over the steps since the row before; everything else in a row is the value at its step.
MEANS = ("loss", "grad_norm", "param_norm")
# Names of the run itself, not of what it does.
_OWN_NAMES = ("exp_name", "resume", "overwrite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run's log.

    Attributes:
        path: of its metrics.jsonl.
        rows: step -> row, in the order of the steps; each has a finite or not finite `loss`.
        held_out: step -> loss on held-out episodes.
        settings: config.json and environment.json, values by dotted path; empty where the run has none.
        notes: what was odd about the log, a sentence each.
    """

    path: pathlib.Path
    rows: Mapping[int, Mapping[str, Any]]
    held_out: Mapping[int, float]
    settings: Mapping[str, Any]
    notes: tuple[str, ...]

    @functools.cached_property
    def steps(self) -> list[int]:
        """Logged steps, ascending."""
        return list(self.rows)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of the rows that have a number there."""
        pairs = [(step, row[key]) for step, row in self.rows.items() if isinstance(row.get(key), int | float)]
        return [step for step, _ in pairs], [float(value) for _, value in pairs]

    def not_finite(self) -> list[int]:
        """Steps with a NaN or an infinity among what was averaged."""
        return [
            step
            for step, row in self.rows.items()
            if any(not math.isfinite(row[key]) for key in MEANS if isinstance(row.get(key), int | float))
        ]


def read_run(path: pathlib.Path) -> Run:
    """Reads a run folder, or its metrics.jsonl.

    Where a log goes back to an earlier step (a resumed run wrote it again), the later rows count, as they do for the
    run itself.

    Raises:
        UserError: there is no log, or no step with a loss in it.
    """
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"{file} is not there: give the folder of a run, checkpoints/<config>/<exp name>, or its {METRICS_FILE}."
        )
    try:
        everything = read_rows(file)
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no log of a run: it is not text.") from error
    usable = [row for row in everything if isinstance(row, dict) and isinstance(row.get("step"), int)]
    notes = []
    if len(usable) < len(everything):
        notes.append(f"{len(everything) - len(usable)} lines without a step were left out")
    rows: dict[int, dict[str, Any]] = {}
    held_out: dict[int, float] = {}
    replaced = 0
    for row in usable:
        step = row["step"]
        if isinstance(row.get("loss"), int | float):
            if rows and step <= next(reversed(rows)):
                late = [known for known in rows if known >= step]
                replaced += len(late)
                for known in late:
                    del rows[known]
                held_out = {known: loss for known, loss in held_out.items() if known < step}
            rows[step] = row
        elif isinstance(row.get("val_loss"), int | float):
            held_out[step] = float(row["val_loss"])
    if not rows:
        raise UserError(f"{file} holds no step with a loss: the run ended before its first log.")
    if replaced:
        notes.append(f"{replaced} rows were written again by a resumed run; the later ones count")
    return Run(path=file, rows=rows, held_out=held_out, settings=_settings(file.parent), notes=tuple(notes))


def setting_differences(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """Dotted path -> both values, where they differ; None stands for a setting that one run does not have."""
    names = sorted({*a.settings, *b.settings})
    pairs = {name: (a.settings.get(name), b.settings.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in _OWN_NAMES}


def windows(run: Run) -> dict[int, int | None]:
    """Step of a row -> the step after which its means begin; None where the log does not tell.

    A row covers the steps since the row before it. A gap that is longer than those on both sides means rows that are
    lost, and what the row after it covers is not known; nor is it for the first row of a log that begins late.
    """
    steps = run.steps
    starts: dict[int, int | None] = {steps[0]: -1 if steps[0] == 0 else None}
    lengths = [b - a for a, b in itertools.pairwise(steps)]
    for index, (start, step) in enumerate(itertools.pairwise(steps)):
        before = lengths[index - 1] if index else math.inf
        after = lengths[index + 1] if index + 1 < len(lengths) else 0
        starts[step] = None if lengths[index] > before and lengths[index] > after else start
    return starts


def _settings(folder: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (CONFIG_FILE, ENVIRONMENT_FILE):
        if (folder / name).is_file():
            try:
                found |= dict(_flatten(json.loads((folder / name).read_text())))
            except ValueError as error:
                raise UserError(f"{folder / name} is no JSON ({error}). Move it away to compare without it.") from error
    return found


def _flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from _flatten(value, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, values
