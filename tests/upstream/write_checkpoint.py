"""Writes what read_checkpoint.py reads: a small checkpoint by our code, and the values it must hold, as npz.

    python tests/upstream/write_checkpoint.py RUN_FOLDER

writes RUN_FOLDER/3 and RUN_FOLDER/expected.npz. The paths are those of a pi0.5 model, with SigLIP's projection named
`value`; one leaf is frozen, so bfloat16.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from openpi_accel import tree
from openpi_accel.config.schema import OptimizerConfig, ScheduleConfig
from openpi_accel.orbax_tree import by_path
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.train.checkpoint import CheckpointStore, Position
from openpi_accel.train.checkpoint_tree import to_items
from openpi_accel.train.loop import compile_step
from openpi_accel.train.optimizer import make_optimizer, make_schedule
from openpi_accel.train.start import abstract_state, fresh_state, shardings_of
from openpi_accel.train.step import make_train_step
from openpi_accel.types import Params

_STEPS = 4
_SHAPES = {
    "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0/value/kernel": (2, 12, 3, 4),
    "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0/value/bias": (2, 3, 4),
    "PaliGemma/img/pos_embedding": (1, 4, 12),
    "PaliGemma/llm/layers/mlp_1/linear": (3, 8, 6),
    "action_in_proj/kernel": (5, 7),
    "action_in_proj/bias": (7,),
}
_FROZEN = "PaliGemma/llm/layers/mlp_1/linear"


def init_params(rng: jax.Array) -> Params:
    return tree.unflatten(
        {
            path: jax.random.normal(jax.random.fold_in(rng, number), shape)
            for number, (path, shape) in enumerate(_SHAPES.items())
        }
    )


def loss_fn(params: Params, batch: jax.Array, rng: jax.Array) -> jax.Array:
    return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32) - jnp.mean(batch))) for leaf in jax.tree.leaves(params))


def is_trainable(path: str) -> bool:
    return path != _FROZEN


def main(folder: str) -> int:
    schedule = make_schedule(ScheduleConfig(warmup_steps=1, peak_lr=1e-2, decay_steps=10, decay_lr=1e-3))
    tx = make_optimizer(OptimizerConfig(), schedule)
    mesh = make_mesh(1)
    abstract = abstract_state(init_params, tx, is_trainable, 0.5, mesh)
    state = fresh_state(init_params, jax.random.key(0), abstract, tx, is_trainable, 0.5)
    step = compile_step(make_train_step(loss_fn, tx, schedule, is_trainable, 0.5), mesh, shardings_of(abstract))
    for _ in range(_STEPS):
        state, _ = step(state, jnp.ones(jax.device_count()), jax.random.key(1))
    store = CheckpointStore(
        pathlib.Path(folder), assets={"physical-intelligence/libero/norm_stats.json": '{"norm_stats": {}}'}
    )
    store.save(_STEPS - 1, state, Position(next_sample=0))
    store.close()
    expected = {f"params/{path}": leaf for path, leaf in tree.flatten(state.ema_params or {}).items()}
    expected |= {f"train_state/{path}": leaf for path, leaf in by_path(to_items(state)[1]).items()}
    arrays = {
        path: np.asarray(leaf, np.float32 if leaf.dtype == jnp.bfloat16 else leaf.dtype)
        for path, leaf in expected.items()
    }
    np.savez(pathlib.Path(folder) / "expected.npz", **arrays)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
