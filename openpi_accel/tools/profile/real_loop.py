"""What the devices wait for: loader and transfer alone, and both beside the step as training runs them."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from openpi_accel.build.data import Data
from openpi_accel.build.mixture import Mixture
from openpi_accel.tools.profile.programs import median
from openpi_accel.train.prefetch import DevicePrefetcher, to_devices

NextBatch = Callable[[Callable[[], object]], tuple[Any, float]]
"""finish_step -> (batch on the devices, seconds that they waited for it); finish_step blocks until they are idle."""
_NUM_TRANSFERS = 5
NUM_WARMUP = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopTimes:
    """Means over the steps of a short loop, in seconds: one step from beginning to beginning, and of that the time in
    which the devices had no batch."""

    step_s: float
    wait_s: float


def time_loader(data: Data | Mixture, num_batches: int) -> float:
    """Seconds per batch of the loader alone, with nothing else running, once its batches made ahead are used up."""
    ahead = data.config.data.prefetch_batches + data.config.num_workers + 1
    with data.loader() as loader:
        for _ in range(ahead):
            next(loader)
        start = time.perf_counter()
        for _ in range(num_batches):
            next(loader)
        return (time.perf_counter() - start) / num_batches


def time_transfer(host_batch: Any, sharding: NamedSharding) -> float:
    """Seconds that a batch takes to the devices, alone."""
    times = []
    for _ in range(NUM_WARMUP + _NUM_TRANSFERS):
        start = time.perf_counter()
        jax.block_until_ready(to_devices(host_batch, sharding))
        times.append(time.perf_counter() - start)
    return median(times[NUM_WARMUP:])


@contextlib.contextmanager
def real_batches(data: Data | Mixture, sharding: NamedSharding) -> Iterator[NextBatch]:
    """The loader behind the prefetcher, as training has them."""
    with data.loader() as loader:
        prefetcher = DevicePrefetcher(loader, sharding)

        def next_batch(finish_step: Callable[[], object]) -> tuple[Any, float]:
            item, wait_s = prefetcher.next(finish_step)
            assert item is not None, "the loader goes through the data for ever"
            return item.batch, wait_s

        try:
            yield next_batch
        finally:
            prefetcher.close()


def time_loop(run_step: Callable[[Any], Any], next_batch: NextBatch, num_steps: int) -> LoopTimes:
    """Steps with one in flight, as the training loop keeps them.

    Args:
        run_step: batch -> metrics.
        next_batch: gives the next one.
        num_steps: timed ones.
    """
    flight: deque[Any] = deque()
    wait_s = start = 0.0

    def finish_step() -> None:
        if flight:
            jax.block_until_ready(flight[-1])

    # What the loader has made ahead at the start would hide it.
    for index in range(NUM_WARMUP + num_steps):
        if index == NUM_WARMUP:
            finish_step()
            wait_s, start = 0.0, time.perf_counter()
        batch, waited_s = next_batch(finish_step)
        wait_s += waited_s
        flight.append(run_step(batch))
        if len(flight) > 1:
            jax.block_until_ready(flight.popleft())
    finish_step()
    return LoopTimes(step_s=(time.perf_counter() - start) / num_steps, wait_s=wait_s / num_steps)
