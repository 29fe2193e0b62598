"""Orbax's way to save a tree of arrays, but every array is sent to the host whole, and a write that fails is known at
once.

Of what lies on several devices in full Orbax would let each send a part, cut out there: by a program for every shape,
place and device, compiled when the first save waits for it, and into memory of the device. Here each array is sent by
one of those that have it, and the arrays are shared out evenly.

Orbax tells of a failure when it is next waited for. Where there are several processes the waiting itself never ends:
those whose writes were fine wait for the one whose write has failed, and that one for them.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding


def share_out(items: Any) -> Any:
    """The same arrays with the first copy of each on another row of the mesh: the first copy is the one that is saved.

    Args:
        items: a tree of arrays or of shapes with shardings. Those on a mesh are on the same one, whose first axis is
            that of copies (`parallel/mesh.py`); anything else stays as it is.
    """
    leaves, structure = jax.tree.flatten(items)
    sizes = [math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves]
    meshes = [leaf.sharding.mesh for leaf in leaves if isinstance(leaf.sharding, NamedSharding)]
    load = [0] * (len(meshes[0].devices) if meshes else 0)
    for index in sorted(range(len(leaves)), key=lambda i: -sizes[i]):
        if isinstance(leaves[index].sharding, NamedSharding):
            row = load.index(min(load))
            load[row] += sizes[index]
            leaves[index] = _first_on(leaves[index], row)
    return jax.tree.unflatten(structure, leaves)


def _first_on(leaf: Any, row: int) -> Any:
    """Nothing is moved: every device keeps its shard, and the order of the rows is another."""
    mesh = leaf.sharding.mesh
    rolled = Mesh(np.roll(mesh.devices, -row, axis=0), mesh.axis_names, axis_types=mesh.axis_types)
    sharding = NamedSharding(rolled, leaf.sharding.spec)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


@dataclasses.dataclass(frozen=True)
class _Watched:
    """A future of Orbax's whose failure is passed on."""

    future: Any
    on_failure: Callable[[Exception], object]

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self.future.result(timeout)
        except Exception as error:
            self.on_failure(error)
            raise

    def cancel(self) -> bool | None:
        return self.future.cancel()


def _whole_arrays() -> dict[str, Any]:
    # A new handler would not write what Orbax's own writes beside the arrays, and cannot be told to.
    arrays = copy.copy(ocp.type_handlers.get_type_handler(jax.Array))
    arrays._use_replica_parallel = False
    return {"type_handler_registry": ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))}


class TreeSaveHandler(ocp.PyTreeCheckpointHandler):
    """Writes ocp.args.PyTreeSave as Orbax does; `on_failure` gets an error from a thread of the writer."""

    def __init__(self, on_failure: Callable[[Exception], object]) -> None:
        super().__init__(**_whole_arrays())
        self._on_failure = on_failure

    @classmethod
    def typestr(cls) -> str:
        """The name that goes into the checkpoint: who reads it needs Orbax alone."""
        return str(ocp.PyTreeCheckpointHandler.typestr())

    async def async_save(self, *args: Any, **kwargs: Any) -> list[Any]:
        futures = await super().async_save(*args, **kwargs)
        return [_Watched(future, self._on_failure) for future in futures or []]
