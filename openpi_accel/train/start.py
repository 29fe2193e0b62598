"""The state a run begins with, born on its shards: no device and no host ever holds a full copy of a sharded tree."""

from collections.abc import Callable

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from openpi_accel import tree
from openpi_accel.parallel.sharding import MIN_NUM_ELEMENTS, state_shardings
from openpi_accel.train.step import IsTrainable, init_state
from openpi_accel.types import Params, TrainState

InitParams = Callable[[jax.Array], Params]


def abstract_state(
    init_params: InitParams,
    tx: optax.GradientTransformation,
    is_trainable: IsTrainable,
    ema_decay: float | None,
    mesh: Mesh | AbstractMesh,
    min_num_elements: int = MIN_NUM_ELEMENTS,
) -> TrainState:
    """The state's shapes, dtypes and shardings (jax.ShapeDtypeStruct leaves); computes nothing.

    Leaves of fewer than `min_num_elements` are replicated.
    """
    shapes = jax.eval_shape(
        lambda rng: init_state(init_params(rng), tx, is_trainable, ema_decay), jax.eval_shape(jax.random.key, 0)
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, mesh, min_num_elements=min_num_elements),
    )


def shardings_of(abstract: TrainState) -> TrainState:
    """The shardings of an abstract state, as jit takes them."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def fresh_state(
    init_params: InitParams,
    rng: jax.Array,
    abstract: TrainState,
    tx: optax.GradientTransformation,
    is_trainable: IsTrainable,
    ema_decay: float | None,
    loaded: Params | None = None,
) -> TrainState:
    """The state before the first step, on the shards of `abstract`.

    Args:
        init_params: rng -> the full parameter tree.
        rng: key of the initialisers.
        abstract: from `abstract_state` with the same arguments.
        tx: the optimizer.
        is_trainable: whether a path is trained.
        ema_decay: None turns the average off.
        loaded: leaves that replace the initialised ones, on the shards of abstract.params; they are donated.
    """

    def build(loaded: Params, rng: jax.Array) -> TrainState:
        replaced = tree.flatten(loaded)  # the initialisers of these are dead code and never run
        flat = tree.flatten(init_params(rng)) | replaced
        return init_state(tree.unflatten(flat), tx, is_trainable, ema_decay)

    return jax.jit(build, out_shardings=shardings_of(abstract), donate_argnums=0)(loaded or {}, rng)
