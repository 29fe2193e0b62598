"""Lays two logs over each other: the same steps, the same windows of averaging, whatever their logging intervals."""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openpi_accel.errors import UserError
from openpi_accel.tools.compare.runs import MEANS, Run, windows

_MAX_NAMED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Steps over which both logs have a mean.

    Attributes:
        step: the last of them, logged by both.
        num_steps: how many they are.
        means: name -> the two means.
        bits: both means are as the runs logged them, so that their bits can be compared.
    """

    step: int
    num_steps: int
    means: Mapping[str, tuple[float, float]]
    bits: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alignment:
    """Two logs laid over each other.

    Attributes:
        windows: in the order of the steps, at least one.
        common: steps that both logged.
        same_steps: both logged the same steps.
        complete: both end at the same step, and no window was left out.
        notes: what is missing, a sentence each.
    """

    windows: Sequence[Window]
    common: Sequence[int]
    same_steps: bool
    complete: bool
    notes: tuple[str, ...]


def align(a: Run, b: Run) -> Alignment:
    """Compares what can be compared.

    Where one run logged more often, its means are averaged over the other's windows, weighted by their steps.

    Raises:
        UserError: no step is in both logs, or no window.
    """
    common = [step for step in a.steps if step in b.rows]
    if not common:
        raise UserError(
            f"{a.path} has steps {_name(a.steps)}, {b.path} {_name(b.steps)}: none is in both. Give two runs whose "
            "--log-interval have a common multiple within their length."
        )
    starts = windows(a), windows(b)
    pieces, left_out = [], []
    before: int | None = None
    for step in common:
        parts = [_rows_of(run, start, before, step) for run, start in zip((a, b), starts, strict=True)]
        if parts[0] is None or parts[1] is None or _begin(parts[0]) != _begin(parts[1]):
            left_out.append(step)
        else:
            pieces.append(_window(step, parts[0], parts[1]))
        before = step
    if not pieces:
        raise UserError(
            f"{a.path} and {b.path} have common steps ({_name(common)}), but their means are over other steps: "
            "nothing can be compared. Give both runs the same --log-interval."
        )
    return Alignment(
        windows=pieces,
        common=common,
        same_steps=a.steps == b.steps,
        complete=not left_out and a.steps[-1] == b.steps[-1],
        notes=tuple(_notes(a, b, common, left_out)),
    )


Part = list[tuple[int, int, Mapping[str, Any]]]
"""(step after which the row's means begin, the row's step, the row), in order."""


def _rows_of(run: Run, starts: Mapping[int, int | None], before: int | None, step: int) -> Part | None:
    """The rows after `before` up to `step`; None where it is not known what they cover."""
    steps = run.steps
    first = 0 if before is None else bisect.bisect_right(steps, before)
    part: Part = []
    for known in steps[first : bisect.bisect_right(steps, step)]:
        start = starts[known]
        if start is None:
            return None
        part.append((start, known, run.rows[known]))
    return part


def _begin(part: Part) -> int:
    return part[0][0]


def _window(step: int, a: Part, b: Part) -> Window:
    names = [name for name in MEANS if all(isinstance(row.get(name), int | float) for _, _, row in (*a, *b))]
    return Window(
        step=step,
        num_steps=step - _begin(a),
        means={name: (_mean(a, name), _mean(b, name)) for name in names},
        bits=len(a) == len(b) == 1,
    )


def _mean(part: Part, name: str) -> float:
    if len(part) == 1:
        return float(part[0][2][name])
    total = sum(step - start for start, step, _ in part)
    return sum((step - start) * row[name] for start, step, row in part) / total


def _notes(a: Run, b: Run, common: Sequence[int], left_out: Sequence[int]) -> Iterable[str]:
    for label, run in (("A", a), ("B", b)):
        yield from (f"{label}: {note}" for note in run.notes)
    if a.steps[-1] != b.steps[-1]:
        shorter = "A" if a.steps[-1] < b.steps[-1] else "B"
        yield f"A ends at step {a.steps[-1]}, B at {b.steps[-1]}: compared as far as {shorter} goes"
    for label, run, other in (("A", a, b), ("B", b, a)):
        missing = [step for step in other.steps if step not in run.rows and step < run.steps[-1]]
        if missing:
            yield f"{label} has no row for {len(missing)} steps of the other: {_name(missing)}"
    if left_out:
        yield f"left out, since the log does not tell over which steps the means are: {_name(left_out)}"


def _name(steps: Sequence[int]) -> str:
    if len(steps) <= _MAX_NAMED:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))}, … {steps[-1]} ({len(steps)} steps)"
