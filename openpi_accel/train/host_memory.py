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
from openpi_accel.train.tree_save import share_out
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
    """(device, bytes) of every shard that this process sends in a save, the largest first."""
    found = []
    for leaf in jax.tree.leaves(share_out(to_items(abstract))):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        senders: dict[str, jax.Device] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            senders.setdefault(str(index), device)
        found += [(d, size) for d in senders.values() if d.process_index == jax.process_index()]
    return sorted(found, key=lambda piece: -piece[1])


def _make(wanted: list[tuple[jax.Device, int]], leaving: threading.Event) -> None:
    held = []  # all at once, as a save has them
    with contextlib.suppress(MemoryError, jax.errors.JaxRuntimeError):  # no room: the save itself will tell
        zeros = np.zeros(max((size for _, size in wanted), default=0), np.uint8)
        for device, size in wanted:
            if leaving.is_set():
                return
            pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
            held.append(jax.block_until_ready(jax.device_put(zeros[:size], pinned)))
