"""A model and a loss on sharded parameters; the very same ones where nothing is sharded (one device, data parallel)."""

import dataclasses
import re
from typing import Any

import jax
from jax.sharding import Mesh

from openpi_accel.models.ops import Ops
from openpi_accel.objective import LossFn
from openpi_accel.parallel.gather import GatheredLayers, gather
from openpi_accel.parallel.mesh import FSDP_AXIS
from openpi_accel.parallel.sharding import MIN_NUM_ELEMENTS, state_shardings
from openpi_accel.types import Params

_GEMMA, _SIGLIP = "PaliGemma/llm/layers/", "PaliGemma/img/Transformer/encoderblock/"
# Not gathered before the model runs: layers, each of which gathers its own, and the embedding table, of which every
# device looks up its own rows for all samples (megabytes of rows move, not the gigabytes of the table).
_STAYS_SHARDED = re.compile(rf"^({_GEMMA}|{_SIGLIP}|PaliGemma/llm/embedder/)")


def sharded_ops(ops: Ops, mesh: Mesh, min_num_elements: int = MIN_NUM_ELEMENTS) -> Ops:
    """`ops` whose layers gather their own parameters."""
    if mesh.shape[FSDP_AXIS] == 1:
        return ops
    towers = (("gemma_layers", _GEMMA), ("siglip_layers", _SIGLIP))
    return dataclasses.replace(
        ops,
        **{
            name: GatheredLayers(run=getattr(ops, name), mesh=mesh, root=root, min_num_elements=min_num_elements)
            for name, root in towers
        },
    )


def sharded_loss(loss_fn: LossFn, mesh: Mesh, min_num_elements: int = MIN_NUM_ELEMENTS) -> LossFn:
    """`loss_fn`, the few sharded parameters outside the layers gathered before it."""
    if mesh.shape[FSDP_AXIS] == 1:
        return loss_fn

    def gathered(params: Params, batch: Any, rng: jax.Array) -> jax.Array:
        shardings = state_shardings(params, mesh, min_num_elements=min_num_elements)

        def use(path: tuple[Any, ...], leaf: jax.Array, sharding: Any) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return leaf if _STAYS_SHARDED.match(name) or not sharding.spec else gather(leaf, sharding)

        return loss_fn(jax.tree_util.tree_map_with_path(use, params, shardings), batch, rng)

    return gathered
