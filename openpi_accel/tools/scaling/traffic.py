"""What one training step sends, reckoned from the sharding of its parameters.

tests/distributed/test_sharded_model.py holds it against the collectives of compiled programs.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from openpi_accel import tree
from openpi_accel.build.sharded import GEMMA_LAYERS, SIGLIP_LAYERS, TABLE
from openpi_accel.parallel.mesh import BATCH_AXIS, FSDP_AXIS

# Who takes part: the devices that share one copy of the parameters, one of each such group, or all.
Group = Literal["fsdp", "batch", "all"]
Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]
_FLOAT32, _INT32 = 4, 4
_STACKS = (GEMMA_LAYERS, SIGLIP_LAYERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Collectives of one kind.

    Attributes:
        kind, group: what is done, and among whom.
        num_bytes: of the whole arrays, of all of them in one step.
        num_calls: in one step; those of one layer, one after the other without work between, count as one.
    """

    kind: Kind
    group: Group
    num_bytes: int
    num_calls: int


def step_transfers(
    params: Mapping[str, Any], *, layer_itemsize: int, vision_passes: int, num_tokens: int
) -> list[Transfer]:
    """The transfers of one step.

    Args:
        params: shapes with shardings.
        layer_itemsize: bytes of a number of layers' parameters when gathered, of their gradients and of those of the
            table's rows: 2 where they are cast to bfloat16 first, else 4. Everything else is float32.
        vision_passes: how often the vision tower runs: once for all cameras, or once for each.
        num_tokens: prompt tokens of all samples of a group, with padding.
    """
    sums: dict[tuple[Kind, Group], list[int]] = {}

    def add(kind: Kind, group: Group, num_bytes: float, calls: int = 0) -> None:
        total = sums.setdefault((kind, group), [0, 0])
        total[0] += round(num_bytes)
        total[1] += calls

    flat = tree.flatten(params)
    mesh = next(iter(flat.values())).sharding.mesh
    fsdp = mesh.shape[FSDP_AXIS]
    for path, leaf in flat.items():
        sharded = any(leaf.sharding.spec)
        stacked = path.startswith(_STACKS)
        passes = vision_passes if path.startswith("PaliGemma/img/") else 1
        itemsize = layer_itemsize if stacked and len(leaf.shape) > 2 else _FLOAT32
        num_bytes = math.prod(leaf.shape) * itemsize * passes
        if path.startswith(TABLE):
            # Every device looks up what it has of all rows of its group. Gradients of rows go to all, with tokens.
            if sharded:
                add("all-reduce", "fsdp", num_tokens * leaf.shape[-1] * _FLOAT32, 1)
            row = leaf.shape[-1] * layer_itemsize + _INT32
            add("all-gather", "all", num_tokens * mesh.shape[BATCH_AXIS] * row, 1)
        elif sharded and not path.endswith("pos_embedding"):
            add("all-gather", "fsdp", num_bytes * (2 if stacked else 1 / passes))
            add("reduce-scatter", "fsdp", num_bytes)
            add("all-reduce", "batch", num_bytes / fsdp)
        else:
            # The positions' gradient is a plain sum over samples, made whole before it is split.
            add("all-reduce", "all", num_bytes)
            if sharded:
                add("all-gather", "fsdp", num_bytes / passes)
    depths = [next(leaf.shape[0] for path, leaf in flat.items() if path.startswith(s)) for s in _STACKS]
    num_layers = depths[0] + depths[1] * vision_passes
    # Once per layer and once for what lies outside the layers; gathers in both directions.
    calls = {"all-gather": 2 * num_layers + 1, "reduce-scatter": num_layers + 1, "all-reduce": num_layers + 1}
    calls_of_layers = {key: 0 if key == ("all-gather", "all") else calls[key[0]] for key in sums}
    return [
        Transfer(kind=kind, group=group, num_bytes=num_bytes, num_calls=num + calls_of_layers[kind, group])
        for (kind, group), (num_bytes, num) in sums.items()
    ]
