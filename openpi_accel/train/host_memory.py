"""The host's memory that a save copies the state into, made before the first save.

On GPUs Orbax copies to pinned memory, which JAX keeps for the next save. Making it takes the driver most of a second
per GiB, and the first save of a run would hold training up for that long (docs/scaling.md).
"""

import contextlib
import math
import threading
from collections.abc import Iterator

import jax
import numpy as np

from openpi_accel.train.checkpoint_tree import to_items
from openpi_accel.types import TrainState


@contextlib.contextmanager
def made_for_saves(abstract: TrainState) -> Iterator[None]:
    """Makes it in a thread while the body runs, which does not wait for it; leaving stops the thread.

    Args:
        abstract: shapes and shardings of the state that will be saved.

    Does nothing on devices other than GPUs: Orbax pins nothing for them.
    """
    if jax.default_backend() != "gpu":
        yield
        return
    leaving = threading.Event()
    thread = threading.Thread(target=_make, args=(pieces(abstract), leaving), name="host memory for saves")
    thread.start()
    try:
        yield
    finally:
        leaving.set()
        thread.join()  # it must not use the devices while they are being closed


def pieces(abstract: TrainState) -> list[tuple[jax.Device, int]]:
    """(device, bytes) of every copy that this process makes in a save.

    As Orbax divides them: of what lies on several devices in full one process sends one copy (`tree_save.py`), several
    processes an equal part from each device.
    """
    alone, found = jax.process_count() == 1, []
    for leaf in jax.tree.leaves(to_items(abstract)):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        copies: dict[str, list[jax.Device]] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            copies.setdefault(str(index), []).append(device)
        for devices in copies.values():
            senders = devices[:1] if alone else devices
            found += [(d, size // len(senders)) for d in senders if d.process_index == jax.process_index()]
    return sorted(found, key=lambda piece: -piece[1])


def _make(wanted: list[tuple[jax.Device, int]], leaving: threading.Event) -> None:
    zeros = np.zeros(max((size for _, size in wanted), default=0), np.uint8)
    held = []  # all at once, as a save has them
    for device, size in wanted:
        if leaving.is_set():
            return
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        try:
            held.append(jax.block_until_ready(jax.device_put(zeros[:size], pinned)))
        except jax.errors.JaxRuntimeError:  # no room: the save itself will tell
            return
