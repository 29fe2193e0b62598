"""Which axis of which array is sharded over which mesh axis, as an ordered table of rules outside the model."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from openpi_accel.parallel.mesh import BATCH_AXIS, FSDP_AXIS


@dataclasses.dataclass(frozen=True)
class LargestAxis:
    """Shard the largest axis that the fsdp devices divide, the first of equals, never one of the first `skip` axes."""

    skip: int = 0


Axes = LargestAxis | PartitionSpec
Rules = Sequence[tuple[str, Axes]]

# (pattern searched in the leaf's path, axes); the first match decides. Optimizer state and averages have their
# parameter's path as a suffix, so they follow it. The layers of a scanned stack lie on axis 0: sharding it would put
# whole layers on single devices, and the scan would wait for one device after the other.
RULES: Rules = (
    (r"/llm/layers/", LargestAxis(skip=1)),
    (r"/encoderblock/", LargestAxis(skip=1)),
    (r"", LargestAxis()),
)
# Leaves below this are replicated: gathering them costs more in latency than their memory is worth.
MIN_NUM_ELEMENTS = 2**20


def state_shardings(
    shapes: Any,
    mesh: Mesh | AbstractMesh,
    rules: Rules = RULES,
    min_num_elements: int = MIN_NUM_ELEMENTS,
    root: str = "",
) -> Any:
    """A NamedSharding for every leaf of any tree of arrays or shapes: a TrainState, parameters, optimizer state.

    Args:
        shapes: leaves with a `shape`, for example from jax.eval_shape.
        mesh: from `mesh.make_mesh`.
        rules: the table; the first pattern found in a leaf's path decides.
        min_num_elements: smaller leaves are replicated.
        root: path of `shapes` within the whole tree, ending in a slash.
    """

    def assign(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = f"/{root}" + jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, _spec(name, tuple(leaf.shape), mesh.shape[FSDP_AXIS], rules, min_num_elements))

    return jax.tree_util.tree_map_with_path(assign, shapes)


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Axis 0 of every array of a batch, over all devices."""
    return NamedSharding(mesh, PartitionSpec((BATCH_AXIS, FSDP_AXIS)))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def _spec(name: str, shape: tuple[int, ...], num_shards: int, rules: Rules, min_num_elements: int) -> PartitionSpec:
    if num_shards == 1 or math.prod(shape) < min_num_elements:
        return PartitionSpec()
    for pattern, axes in rules:
        if re.search(pattern, name):
            return axes if isinstance(axes, PartitionSpec) else _largest_axis(shape, num_shards, axes.skip)
    return PartitionSpec()


def _largest_axis(shape: tuple[int, ...], num_shards: int, skip: int) -> PartitionSpec:
    candidates = [axis for axis in range(skip, len(shape)) if shape[axis] % num_shards == 0]
    if not candidates:
        return PartitionSpec()
    chosen = max(candidates, key=lambda axis: (shape[axis], -axis))
    return PartitionSpec(*[None] * chosen, FSDP_AXIS)
