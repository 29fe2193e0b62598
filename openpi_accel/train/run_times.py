"""How fast a run was, from times that are at hand anyway."""

import itertools
import statistics
import time

from openpi_accel.train.memory import peak_memory_gib


class RunTimes:
    """Collects when steps were seen to be done, and how long the devices waited for data.

    Args:
        batch_size: samples per step.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._done_s: list[float] = []
        self._wait_s = 0.0

    def step_done(self, wait_s: float) -> None:
        """A step is done; `wait_s` is how long the devices waited for data since the step before."""
        if self._done_s:  # the first step's wait is start-up
            self._wait_s += wait_s
        self._done_s.append(time.perf_counter())

    def summary(self) -> str | None:
        """One line; None for fewer than three steps. The median step leaves saves and validation out; the share of the
        data wait is of the whole time between the first step and the last."""
        if len(self._done_s) < 3:
            return None
        median_s = statistics.median(after - before for before, after in itertools.pairwise(self._done_s))
        share = self._wait_s / (self._done_s[-1] - self._done_s[0])
        memory = peak_memory_gib()
        device = memory.get("device_memory_peak_gib")
        return (
            f"{len(self._done_s)} steps: median {median_s:.3f} s a step ({self._batch_size / median_s:.1f} samples/s), "
            f"{100 * min(1.0, share):.0f} % of the time waiting for data, peak memory "
            + (f"{device:.1f} GiB of a device, " if device is not None else "")
            + f"{memory['host_memory_peak_gib']:.1f} GiB of this process. Where the time goes: scripts/profile.py"
        )
