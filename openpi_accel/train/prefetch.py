"""Moves batches from the loader to the devices ahead of the step, and measures when the devices waited for them."""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

_CLOSE_TIMEOUT_S = 10


class LoadedBatch(Protocol):
    """What a loader yields for one global batch."""

    @property
    def batch(self) -> Any:
        """This process's share: a pytree of numpy arrays, samples on axis 0."""

    @property
    def sample_ids(self) -> np.ndarray:
        """Which samples the global batch has, integers, the same in every process."""

    @property
    def next_sample(self) -> int:
        """The loader's position after this batch."""


@dataclasses.dataclass(frozen=True)
class DeviceBatch:
    """A global batch on the devices; `host` is this process's share of it."""

    batch: Any
    host: LoadedBatch


class DevicePrefetcher:
    """Iterates over a loader in a thread of its own, at most `depth` batches ahead of the step.

    Args:
        loader: yields LoadedBatch.
        sharding: how every array of a batch is split, on axis 0, over the devices of all processes.
        depth: batches on the devices at once beside the one in use; each costs device memory.
    """

    def __init__(self, loader: Iterable[LoadedBatch], sharding: NamedSharding, depth: int = 2) -> None:
        self._queue: queue.Queue[DeviceBatch | BaseException | None] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._sharding = sharding
        self._thread = threading.Thread(target=self._fill, args=(iter(loader),), name="device_prefetch", daemon=True)
        self._thread.start()

    def next(self, finish_step: Callable[[], object]) -> tuple[DeviceBatch | None, float]:
        """The next batch, None at the loader's end, and the seconds that the devices were idle for want of it.

        Args:
            finish_step: blocks until the step in flight is done; time counts as waiting only after that.

        Raises:
            Exception: what the loader raised.
        """
        wait_s = 0.0
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            finish_step()
            start = time.perf_counter()
            item = self._queue.get()
            wait_s = time.perf_counter() - start
        if isinstance(item, BaseException):
            raise item
        return item, wait_s

    def close(self) -> None:
        """Stops the thread; batches fetched ahead are dropped. A loader that hangs is left behind after a while."""
        self._stop.set()
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=0.05)

    def _fill(self, batches: Iterator[LoadedBatch]) -> None:
        try:
            for host in batches:
                self._queue.put(DeviceBatch(to_devices(host.batch, self._sharding), host))
                if self._stop.is_set():
                    return
            self._queue.put(None)
        except BaseException as error:  # it belongs to the thread that calls next()
            self._queue.put(error)


def to_devices(batch: Any, sharding: NamedSharding) -> Any:
    """Global arrays from this process's share of a batch."""
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, np.asarray(array)), batch)
