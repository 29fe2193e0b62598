"""The search: upstream's settings, then all that may save time at once, then one change at a time from the best."""

import dataclasses
import time
from collections.abc import Callable, Iterator

from openpi_accel.config.schema import TrainConfig
from openpi_accel.tools.plan.search import Planned, Planner
from openpi_accel.tools.tune.space import Point, all_on, neighbours
from openpi_accel.tools.tune.trials import Bench, Trial

_GIB = 2**30
# Samples per device of the first trial, which only says where the search began.
_FIRST_BATCH = 32
# More per device is not tried: a step of a second is long enough to hide what is not computation.
_LARGEST_BATCH = 256
# A program of unrolled layers takes that much longer to compile than a scanned one (docs/performance.md).
_UNROLLED_TAKES = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """What a search needs to know.

    Attributes:
        config: with a fixed prompt length.
        bench: runs the trials.
        fixed: fields of a Point that the user has decided.
        limit: bytes of a device that JAX may use; None predicts nothing.
        budget_s: for all trials of this call.
        say: tells about each trial.
    """

    config: TrainConfig
    bench: Bench
    fixed: frozenset[str]
    limit: int | None
    budget_s: float
    say: Callable[[Trial], None]

    def run(self, start: Point) -> list[Trial]:
        """All outcomes, in the order tried; those of an earlier call under the same key are taken over."""
        ends_s = time.monotonic() + self.budget_s
        known, trials = self.bench.known(), dict[Point, Trial]()
        for point in self._candidates(start, trials):
            trial = known.get(point) or self._try(point, ends_s - time.monotonic(), list(trials.values()))
            if trial is not None:
                trials[point] = trial
                self.say(trial)
            shortest_s = min((t.wall_s for t in trials.values() if t.samples_per_s is not None), default=0.0)
            if ends_s - time.monotonic() < shortest_s and not known.keys() - trials.keys():
                break
        return list(trials.values())

    def _candidates(self, start: Point, trials: dict[Point, Trial]) -> Iterator[Point]:
        """Settings to try, as the outcomes so far suggest."""
        seen: set[Point] = set()

        def fresh(point: Point) -> Iterator[Point]:
            if point not in seen:
                seen.add(point)
                yield point

        small = start if "batch_per_device" in self.fixed else self._at_most(start, _FIRST_BATCH)
        yield from fresh(small)
        corner: Point | None = self._largest(all_on(start, self.fixed))
        while corner is not None:
            yield from fresh(corner)
            failed = corner in trials and trials[corner].samples_per_s is None
            corner = self._smaller(corner) if failed else None
        centre: Point | None = None
        while centre != (centre := self._best(trials, start)):
            for point in neighbours(centre, self.fixed, self.bench.num_devices):
                yield from fresh(point if point.batch_per_device < centre.batch_per_device else self._largest(point))
                if self._best(trials, start) != centre:
                    break  # go on from the better one

    def _best(self, trials: dict[Point, Trial], otherwise: Point) -> Point:
        best = fastest(list(trials.values()))
        return otherwise if best is None else best.point

    def _at_most(self, point: Point, batch: int) -> Point:
        return dataclasses.replace(point, batch_per_device=min(point.batch_per_device, batch))

    def _smaller(self, point: Point) -> Point | None:
        """With an eighth less of a batch; None where it is fixed, or small already."""
        batch = point.batch_per_device * 7 // 8 // 8 * 8
        if "batch_per_device" in self.fixed or batch == 0:
            return None
        return dataclasses.replace(point, batch_per_device=batch)

    def _largest(self, point: Point) -> Point:
        """With the largest batch that is predicted to fit, a multiple of 8 where it is larger than that."""
        if "batch_per_device" in self.fixed or self.limit is None:
            return point
        most = dataclasses.replace(point, batch_per_device=_LARGEST_BATCH)
        config = most.config(self.config, self.bench.num_devices)
        planned = self._planner(point).largest_batch(config, config)
        if planned is None:
            return point
        batch = planned.config.batch_size // self.bench.num_devices
        unit = max(8, point.num_microbatches) if batch >= 16 else point.num_microbatches
        return dataclasses.replace(point, batch_per_device=batch // unit * unit)

    def _try(self, point: Point, left_s: float, before: list[Trial]) -> Trial | None:
        """None where the time that is left is too short for it."""
        if point.batch_per_device % point.num_microbatches or left_s < _expected_s(point, before):
            return None
        started_s = time.monotonic()
        planned = self._planned(point)
        predicted_gib = None if planned is None else planned.need.total / _GIB
        if planned is not None and self.limit is not None and planned.need.total > self.limit:
            return self.bench.refuse(point, predicted_gib, "does not fit, by prediction")
        return self.bench.run(point, predicted_gib, left_s - (time.monotonic() - started_s))

    def _planned(self, point: Point) -> Planned | None:
        if self.limit is None:
            return None
        config = point.config(self.config, self.bench.num_devices)
        return self._planner(point).plan(config, config)

    def _planner(self, point: Point) -> Planner:
        return Planner(acceleration=point.acceleration(), num_devices=self.bench.num_devices, limit=self.limit or 0)


def fastest(trials: list[Trial]) -> Trial | None:
    """The one of the most samples per second; None where none ran."""
    ran = [trial for trial in trials if trial.samples_per_s is not None]
    return max(ran, key=lambda trial: trial.samples_per_s or 0.0, default=None)


def _expected_s(point: Point, before: list[Trial]) -> float:
    """How long a trial will take, by those of its kind, else of the other; 0 before the first."""
    ran = [trial for trial in before if trial.samples_per_s is not None]
    alike = [trial.wall_s for trial in ran if trial.point.unroll_layers == point.unroll_layers]
    if alike:
        return max(alike)
    return max((trial.wall_s for trial in ran), default=0.0) * (_UNROLLED_TAKES if point.unroll_layers else 1.0)
