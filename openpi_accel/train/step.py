"""One training step as pure functions: (state, batch, rng) -> (state, metrics). Knows neither model nor devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from openpi_accel import tree
from openpi_accel.types import Params, TrainState

IsTrainable = Callable[[str], bool]
LossFn = Callable[[Params, Any, jax.Array], jax.Array]
"""(params, batch, rng of this step) -> scalar mean loss, float32."""
ValueAndGrad = Callable[[Callable[..., jax.Array]], Callable[..., tuple[jax.Array, Params]]]
Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Any, jax.Array], tuple[TrainState, Metrics]]

# Upstream leaves these out of the logged parameter norm, with everything of one dimension or none.
_NOT_IN_PARAM_NORM = ("bias", "scale", "pos_embedding", "input_embedding")


def init_state(
    params: Params, tx: optax.GradientTransformation, is_trainable: IsTrainable, ema_decay: float | None
) -> TrainState:
    """The state before the first step: frozen leaves in bfloat16, optimizer state over the trainable ones alone.

    The average starts from copies, so that both trees can be donated to the step.
    """
    trainable, frozen = tree.split(params, is_trainable)
    params = tree.merge(trainable, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), frozen))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=tx.init(trainable),
        ema_params=None if ema_decay is None else jax.tree.map(jnp.copy, params),
    )


def make_gradient(
    loss_fn: LossFn, is_trainable: IsTrainable, value_and_grad: ValueAndGrad = jax.value_and_grad
) -> Callable[[Params, Any, jax.Array], tuple[jax.Array, Params]]:
    """(params, batch, rng of this step) -> loss, and its gradient over the trainable leaves."""

    def gradient(params: Params, batch: Any, rng: jax.Array) -> tuple[jax.Array, Params]:
        trainable, frozen = tree.split(params, is_trainable)

        def loss_of(trainable: Params, batch: Any, rng: jax.Array) -> jax.Array:
            return loss_fn(tree.merge(trainable, frozen), batch, rng)

        return value_and_grad(loss_of)(trainable, batch, rng)

    return gradient


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    is_trainable: IsTrainable,
    ema_decay: float | None,
    value_and_grad: ValueAndGrad = jax.value_and_grad,
) -> Step:
    """Builds the step.

    `value_and_grad` may be a drop-in for jax.value_and_grad that gets there another way; it is applied to
    (trainable parameters, batch, rng of this step) -> loss.

    Its metrics are float32 scalars: loss; grad_norm, the global norm over trainable leaves before clipping;
    param_norm, after the update (see `param_norm`); learning_rate, the one this update used.
    """
    gradient = make_gradient(loss_fn, is_trainable, value_and_grad)

    def step(state: TrainState, batch: Any, train_rng: jax.Array) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(train_rng, state.step)
        loss, grads = gradient(state.params, batch, rng)
        trainable, frozen = tree.split(state.params, is_trainable)
        updates, opt_state = tx.update(grads, state.opt_state, trainable)
        params = tree.merge(optax.apply_updates(trainable, updates), frozen)

        new_state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            ema_params=None if ema_decay is None else _average(state.ema_params, params, ema_decay, is_trainable),
        )
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "param_norm": param_norm(params),
            "learning_rate": jnp.asarray(schedule(state.step)),
        }
        return new_state, {name: value.astype(jnp.float32) for name, value in metrics.items()}

    return step


def param_norm(params: Params) -> jax.Array:
    """Global norm over the leaves with more than one dimension that are no bias, scale or embedding.

    As upstream logs it: each leaf is squared and summed in its own dtype, so frozen bfloat16 leaves in bfloat16.
    """
    return optax.tree.norm(
        [
            leaf
            for path, leaf in tree.flatten(params).items()
            if leaf.ndim > 1 and path.rpartition("/")[2] not in _NOT_IN_PARAM_NORM
        ]
    )


def _average(ema: Params | None, params: Params, decay: float, is_trainable: IsTrainable) -> Params:
    """decay * ema + (1 - decay) * new. A frozen leaf is its own average: repeated bfloat16 rounding would move it."""
    if ema is None:
        raise ValueError(
            "ema_decay is set, but the state has no ema_params: build it by init_state with the same value"
        )
    old, new = tree.flatten(ema), tree.flatten(params)
    return tree.unflatten(
        {path: decay * old[path] + (1 - decay) * new[path] if is_trainable(path) else old[path] for path in old}
    )
