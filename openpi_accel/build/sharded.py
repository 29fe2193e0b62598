"""A model and a loss on several devices; the very same ones on a single one."""

import dataclasses
import re
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from openpi_accel.models.ops import Ops
from openpi_accel.models.stack import RunLayers
from openpi_accel.objective import LossFn
from openpi_accel.parallel.gather import GatheredLayers, ShardedLookUp, gather
from openpi_accel.parallel.mesh import FSDP_AXIS
from openpi_accel.parallel.sharding import MIN_NUM_ELEMENTS, state_shardings
from openpi_accel.types import Params

GEMMA_LAYERS, SIGLIP_LAYERS = "PaliGemma/llm/layers/", "PaliGemma/img/Transformer/encoderblock/"
TABLE = "PaliGemma/llm/embedder/"
# Not gathered before the model runs: layers, each of which gathers its own, and the embedding table, of which every
# device looks up its own rows for all samples (megabytes of rows move, not the gigabytes of the table).
_STAYS_SHARDED = re.compile(rf"^({GEMMA_LAYERS}|{SIGLIP_LAYERS}|{TABLE})")


def sharded_ops(ops: Ops, mesh: Mesh | AbstractMesh, min_num_elements: int = MIN_NUM_ELEMENTS) -> Ops:
    """`ops` for several devices: gradients of the table by rows, and layers that gather their own parameters."""
    if mesh.size == 1:
        return ops
    table = ShardedLookUp(mesh=mesh, path=TABLE + "input_embedding", min_num_elements=min_num_elements)
    ops = dataclasses.replace(ops, look_up=table)
    if mesh.shape[FSDP_AXIS] == 1:
        return ops

    def gathered(run: RunLayers, root: str) -> GatheredLayers:
        return GatheredLayers(run=run, mesh=mesh, root=root, min_num_elements=min_num_elements)

    return dataclasses.replace(
        ops,
        gemma_layers=gathered(ops.gemma_layers, GEMMA_LAYERS),
        siglip_layers=gathered(ops.siglip_layers, SIGLIP_LAYERS),
    )


def sharded_loss(loss_fn: LossFn, mesh: Mesh | AbstractMesh, min_num_elements: int = MIN_NUM_ELEMENTS) -> LossFn:
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
