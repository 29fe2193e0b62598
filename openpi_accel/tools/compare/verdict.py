"""What differs between two runs, and whether that is within the bounds."""

import dataclasses
import math
import statistics
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from openpi_accel.tools.compare.align import Alignment, align
from openpi_accel.tools.compare.runs import MEANS, Run, setting_differences

# The late window is the last tenth of what is compared, but at least so many rows of it.
_LATE_SHARE, _MIN_LATE = 10, 10
# Runs that rounding alone drives apart are at a random distance from each other: A may be this many times further from
# B than from the control.
CONTROL_FACTOR = 2.0
WITHIN_CONTROL = "within the control"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """What must hold.

    Attributes:
        mean_difference: bound of the mean over all steps of |loss A - loss B|.
        late_difference: bound of the difference between the mean losses of the late window.
        equal: instead, every logged mean must be equal to the bit, in the same steps.
        relative: instead, the largest relative difference of every logged mean.
    """

    mean_difference: float = 1e-4
    late_difference: float = 1e-3
    equal: bool = False
    relative: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Of one logged figure, over the finite pairs.

    Attributes:
        mean, largest: of |a - b| over the steps (a window counts by its steps); None without a finite pair.
        largest_at: step of the largest; None where nothing differs.
        largest_relative: of |a - b| over the larger of both.
        first_unequal: the first step whose bits differ, None where none does.
    """

    mean: float | None
    largest: float | None
    largest_at: int | None
    largest_relative: float | None
    first_unequal: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Late:
    """The last steps: from the first to the last of them, and both runs' mean losses."""

    steps: tuple[int, int]
    losses: tuple[float, float]

    @property
    def difference(self) -> float:
        """Of the mean losses."""
        return abs(self.losses[0] - self.losses[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the verdict."""

    name: str
    passed: bool
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distance:
    """How far two runs are apart.

    Attributes:
        alignment: what was compared.
        differences: by name of the figure.
        late: the last steps.
    """

    alignment: Alignment
    differences: Mapping[str, Difference]
    late: Late


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs, perhaps with a control: a run that differs from A by rounding alone.

    Attributes:
        a, b: the runs.
        distance: of A and B.
        control, control_distance: the control, and its distance from A.
        checks: the verdict, a line each.
        settings: what config.json and environment.json say differently.
        notes: what was missing or odd.
    """

    a: Run
    b: Run
    distance: Distance
    control: Run | None
    control_distance: Distance | None
    checks: Sequence[Check]
    settings: Mapping[str, tuple[Any, Any]]
    notes: Sequence[str]

    @property
    def passed(self) -> bool:
        """Every line of the verdict holds."""
        return all(check.passed for check in self.checks)


def compare(a: Run, b: Run, bounds: Bounds, control: Run | None = None) -> Comparison:
    """Compares two logs.

    Raises:
        UserError: nothing can be compared.
    """
    distance = measure(a, b)
    control_distance = None if control is None else measure(a, control)
    notes = list(distance.alignment.notes)
    if control_distance is not None:
        notes += [f"control: {note}" for note in control_distance.alignment.notes]
    checks = [_finite(a, b), _learning_rate(a, b, distance.alignment.common)]
    batches = _same_batches(a, b, distance.alignment.common)
    if batches is None:
        notes.append("a log without sample_ids_hash: whether both runs saw the same batches is not known")
    else:
        checks.append(batches)
    if bounds.equal:
        checks += _equal(distance)
    elif bounds.relative is not None:
        checks += _relative(distance, bounds.relative)
    else:
        checks += _within(distance, bounds)
    if control_distance is not None:
        checks.append(_within_control(distance, control_distance))
    return Comparison(
        a=a,
        b=b,
        distance=distance,
        control=control,
        control_distance=control_distance,
        checks=checks,
        settings=setting_differences(a, b),
        notes=notes,
    )


def measure(a: Run, b: Run) -> Distance:
    """How far apart two runs are.

    Raises:
        UserError: nothing can be compared.
    """
    alignment = align(a, b)
    names = [name for name in MEANS if any(name in window.means for window in alignment.windows)]
    return Distance(
        alignment=alignment, differences={name: _difference(alignment, name) for name in names}, late=_late(alignment)
    )


def _difference(alignment: Alignment, name: str) -> Difference:
    total = weight = 0.0
    largest = largest_relative = None
    largest_at = first_unequal = None
    for window in alignment.windows:
        if name not in window.means:
            continue
        x, y = window.means[name]
        if first_unequal is None and not _same_bits(x, y):
            first_unequal = window.step
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        apart = abs(x - y)
        total, weight = total + window.num_steps * apart, weight + window.num_steps
        if apart > (largest or 0.0):
            largest_at = window.step
        largest = max(largest or 0.0, apart)
        largest_relative = max(largest_relative or 0.0, apart / max(abs(x), abs(y)) if apart else 0.0)
    return Difference(
        mean=total / weight if weight else None,
        largest=largest,
        largest_at=largest_at,
        largest_relative=largest_relative,
        first_unequal=first_unequal,
    )


def _late(alignment: Alignment) -> Late:
    count = min(len(alignment.windows), max(_MIN_LATE, len(alignment.windows) // _LATE_SHARE))
    windows = alignment.windows[-count:]
    num_steps = sum(window.num_steps for window in windows)
    a, b = (sum(w.num_steps * w.means["loss"][i] for w in windows) / num_steps for i in (0, 1))
    return Late(steps=(windows[0].step - windows[0].num_steps + 1, windows[-1].step), losses=(a, b))


def _finite(a: Run, b: Run) -> Check:
    parts = [f"{label} has NaN or infinity at step {steps[0]}" + (f" and {len(steps) - 1} more" if steps[1:] else "")
             for label, steps in (("A", a.not_finite()), ("B", b.not_finite())) if steps]  # fmt: skip
    return Check(name="finite", passed=not parts, text="; ".join(parts) or "every logged figure is finite")


def _learning_rate(a: Run, b: Run, common: Sequence[int]) -> Check:
    pairs = [(step, a.rows[step].get("learning_rate"), b.rows[step].get("learning_rate")) for step in common]
    absent = [step for step, x, y in pairs if x is None or y is None]
    unequal = [(step, x, y) for step, x, y in pairs if x != y]
    if absent:
        text = f"not logged at step {absent[0]}"
    elif unequal:
        step, x, y = unequal[0]
        text = f"differs at {len(unequal)} of {len(common)} steps, first at {step}: {x!r} and {y!r}"
    else:
        text = f"equal to the bit at {len(common)} steps"
    return Check(name="learning rate", passed=not absent and not unequal, text=text)


def _same_batches(a: Run, b: Run, common: Sequence[int]) -> Check | None:
    key = "sample_ids_hash"
    known = [step for step in common if key in a.rows[step] and key in b.rows[step]]
    if not known:
        return None
    other = [step for step in known if a.rows[step][key] != b.rows[step][key]]
    text = (
        f"the runs saw other samples at {len(other)} of {len(known)} logged steps, first at {other[0]}: seed, data or "
        "batch size differ"
        if other
        else f"both runs saw the same samples at {len(known)} logged steps"
    )
    return Check(name="batches", passed=not other, text=text)


def _within(distance: Distance, bounds: Bounds) -> list[Check]:
    mean, late = distance.differences["loss"].mean, distance.late
    first, last = late.steps
    return [
        Check(
            name="mean loss difference",
            passed=mean is not None and mean < bounds.mean_difference,
            text=f"{_number(mean)} over {len(distance.alignment.windows)} rows, bound {bounds.mean_difference:g}",
        ),
        Check(
            name="late-window difference",
            passed=late.difference < bounds.late_difference,  # NaN fails
            text=f"{late.difference:.2e} between the mean losses of steps {first} to {last} ({late.losses[0]:.6f} and "
            f"{late.losses[1]:.6f}), bound {bounds.late_difference:g}",
        ),
    ]


def _equal(distance: Distance) -> list[Check]:
    alignment = distance.alignment
    checks = [
        Check(
            name="same steps",
            passed=alignment.same_steps and all(window.bits for window in alignment.windows),
            text=f"{len(alignment.common)} steps are in both logs"
            + ("" if alignment.same_steps else ", others in one alone: --assert-equal asks for the same ones"),
        )
    ]
    for name, difference in distance.differences.items():
        step = difference.first_unequal
        text = "equal to the bit" if step is None else f"differs first at step {step}"
        checks.append(Check(name=f"{name} equal", passed=step is None, text=text))
    return checks


def _relative(distance: Distance, bound: float) -> list[Check]:
    checks = [
        Check(
            name="complete",
            passed=distance.alignment.complete,
            text="both logs end at the same step, nothing left out"
            if distance.alignment.complete
            else "the logs end at different steps, or rows are missing",
        )
    ]
    for name, difference in distance.differences.items():
        largest = difference.largest_relative
        checks.append(
            Check(
                name=f"{name} within --rtol",
                passed=largest is not None and largest <= bound,
                text=f"largest relative difference {_number(largest)}, bound {bound:g}",
            )
        )
    return checks


def _within_control(distance: Distance, control: Distance) -> Check:
    """Rounding alone drives the control from A; B must not be further than that, but for chance."""
    ours, theirs = distance.differences["loss"].mean, control.differences["loss"].mean
    passed = ours is not None and theirs is not None and ours <= CONTROL_FACTOR * theirs
    times = f"{ours / theirs:.2f} times as far" if ours is not None and theirs else "no multiple of it"
    return Check(
        name=WITHIN_CONTROL,
        passed=passed,
        text=f"A and the control, which differs by rounding alone, are {_number(theirs)} apart in mean loss; A and B "
        f"{_number(ours)}, {times} (at most {CONTROL_FACTOR:g})",
    )


def _number(value: float | None) -> str:
    return "nothing finite" if value is None else f"{value:.2e}"


def _same_bits(x: float, y: float) -> bool:
    return struct.pack("d", x) == struct.pack("d", y)


def median(run: Run, key: str) -> float | None:
    """Of a logged figure over the rows after the first, whose step may have waited for start-up; None where absent."""
    values = run.series(key)[1]
    return statistics.median(values[1:] or values) if values else None


def largest(run: Run, key: str) -> float | None:
    """Of a logged figure; None where absent."""
    return max(run.series(key)[1], default=None)
