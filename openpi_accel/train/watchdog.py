"""When does a step take far longer than the others, and who holds it up? Only tells; never ends anything."""

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from openpi_accel.parallel.exchange import name_ranks
from openpi_accel.parallel.peers import Seat

START, COMPILE, DATA, STEP = "starting", "compiling the step", "waiting for data", "running the step"
SAVE, VALIDATE, END = "saving a checkpoint", "measuring the validation loss", "ending"

# A step is far too long after so many times the median of the latest ones, and never before SLOW_S seconds.
SLOW_FACTOR = 10.0
SLOW_S = 30.0
# What is no step may take long, and so may the first two steps, in which kernels are tuned and caches are filled.
LONG_S = 1800.0
# A process of which nothing is heard for so long is named as such; it says something every second.
SILENT_S = 10.0
_NUM_LATEST = 50


class StepClock:
    """What this process does, since when, and how long the latest steps took; read by another thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._step, self._phase, self._phase_began_s = 0, START, now()
        self._step_s: float | None = None
        self._latest: deque[float] = deque(maxlen=_NUM_LATEST)

    def begin_step(self, index: int) -> None:
        """Step `index` begins with its wait for data, and the one before it is over."""
        self.begin(DATA)
        with self._lock:
            if self._step_s is not None:
                self._latest.append(self._step_s)
            self._step, self._step_s = index, 0.0

    def begin(self, phase: str) -> None:
        """The phase that this process is in from now on."""
        with self._lock:
            now_s = self._now()
            if self._step_s is not None and self._phase in (DATA, STEP):  # what else comes between steps does not count
                self._step_s += now_s - self._phase_began_s
            self._phase, self._phase_began_s = phase, now_s

    @contextlib.contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Another phase for a while."""
        before = self._phase
        self.begin(phase)
        try:
            yield
        finally:
            self.begin(before)

    def seat(self) -> Seat:
        """What to say to the others."""
        with self._lock:
            return Seat(step=self._step, phase=self._phase, phase_s=self._now() - self._phase_began_s)

    def elapsed_s(self) -> float:
        """Seconds that count against `limit_s`: of the step, or of what is no step."""
        with self._lock:
            here_s = self._now() - self._phase_began_s
            return here_s + self._step_s if self._phase in (DATA, STEP) and self._step_s is not None else here_s

    def median_s(self) -> float | None:
        """Of the latest steps; None before two are done."""
        with self._lock:
            return statistics.median(self._latest) if len(self._latest) >= 2 else None


def limit_s(phase: str, median_s: float | None) -> float:
    """How long a step, or something else, may take before it is told."""
    if phase not in (DATA, STEP) or median_s is None:
        return LONG_S
    return max(SLOW_FACTOR * median_s, SLOW_S)


def is_silent(seat: Seat) -> bool:
    """Whether a process should have been heard of."""
    return seat.silent_s > SILENT_S and seat.phase != END


def waited_for(seats: Mapping[int, Seat]) -> list[int]:
    """The ranks that hold up the others: not heard of, else behind in steps, else not in the step; may be none."""
    silent = [rank for rank, seat in seats.items() if is_silent(seat)]
    if silent:
        return silent
    first, last = (pick((seat.step for seat in seats.values()), default=0) for pick in (min, max))
    behind = [rank for rank, seat in seats.items() if seat.step == first] if first < last else list(seats)
    # Where the last ones compute like everybody, nobody holds the others up: the collective itself does not end.
    return [rank for rank in behind if seats[rank].phase != STEP] or (behind if first < last else [])


def complaint(rank: int, own: Seat, seats: Mapping[int, Seat], elapsed_s: float, median_s: float | None) -> str:
    """What to tell about a step that takes too long; empty where this process has nothing to say.

    Rank 0 speaks, and whoever is waited for. While somebody does what may take long, such as a save, there is
    nothing to tell yet.

    Args:
        rank: this process.
        own: what it does.
        seats: of all processes; one entry or none where there is one process.
        elapsed_s: of the step.
        median_s: of the latest steps.
    """
    if own.phase in (DATA, STEP):
        usual = "" if median_s is None else f" (the latest ones took {median_s:.3g} s)"
        what = f"step {own.step} has been under way for {elapsed_s:.0f} s{usual}"
    else:
        what = f"{own.phase} at step {own.step} has taken {elapsed_s:.0f} s"
    if len(seats) < 2:
        return f"warning: {what}: this process is {own.phase}"
    ranks = waited_for(seats)
    if rank != 0 and rank not in ranks:
        return ""
    if any(seats[r].phase not in (DATA, STEP) and seats[r].phase_s < LONG_S and r != rank for r in ranks):
        return ""
    if not ranks:
        return f"warning: {what}: all ranks are {STEP}, so a collective does not end; look at the network (NCCL_DEBUG)"
    silent = [r for r in ranks if is_silent(seats[r])]
    if silent:
        quiet_s = max(seats[r].silent_s for r in silent)
        return f"warning: {what}: nothing was heard of {name_ranks(silent)} for {quiet_s:.0f} s"
    doing = "; ".join(f"rank {r} is {seats[r].phase}, in step {seats[r].step}" for r in ranks[:8])
    return f"warning: {what}; it waits for {name_ranks(ranks)}: {doing}"
