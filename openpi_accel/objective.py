"""Flow matching (Lipman et al. 2023) as pi0 uses it: x_t = t noise + (1 - t) actions, target noise - actions.

Shape letters: B batch, A action horizon, E action dim.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from openpi_accel.types import Batch, Observation, Params


class VelocityModel(Protocol):
    """What the objective needs of a model."""

    def velocity(self, obs: Observation, x_t: jax.Array, time: jax.Array) -> jax.Array:
        """x_t: B A E, time: B -> B A E."""
        ...


AugmentFn = Callable[[jax.Array, dict[str, jax.Array]], dict[str, jax.Array]]
LossFn = Callable[[Params, Batch, jax.Array], jax.Array]


def draw_noise_time(
    noise_rng: jax.Array, time_rng: jax.Array, action_shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """For actions of shape B A E: noise B A E, standard normal; time B, Beta(1.5, 1) moved into (0.001, 1)."""
    noise = jax.random.normal(noise_rng, action_shape)
    time = jax.random.beta(time_rng, 1.5, 1.0, action_shape[:1]) * 0.999 + 0.001
    return noise, time


def flow_matching_loss(
    model: VelocityModel,
    obs: Observation,
    actions: jax.Array,
    noise: jax.Array,
    time: jax.Array,
    weights: jax.Array | None = None,
) -> jax.Array:
    """Squared error of the velocity, averaged over the E action dimensions.

    Args:
        model: gives the velocity.
        obs: images float32 in [-1, 1].
        actions, noise: B A E; time: B.
        weights: B A E of every squared error (`loss_weights`); None weighs all alike.

    Returns:
        B A float32.
    """
    t = time[:, None, None]
    predicted = model.velocity(obs, t * noise + (1 - t) * actions, time)
    errors = jnp.square(predicted - (noise - actions))
    return jnp.mean(errors if weights is None else errors * weights, axis=-1)


def loss_weights(action_mask: jax.Array | None) -> jax.Array | None:
    """Weights of mean 1, so that the mean of the weighted errors is the mean over what counts. None for no mask.

    Args:
        action_mask: B A E bool, of the whole batch. Where nothing counts, all weights are 0.
    """
    if action_mask is None:
        return None
    mask = action_mask.astype(jnp.float32)
    share = jnp.mean(mask)
    return mask / jnp.where(share > 0, share, 1.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A batch with everything random drawn: what is left to do is deterministic, sample by sample.

    Attributes:
        obs: images float32 in [-1, 1], augmented.
        actions, noise: B A E; time: B.
        weights: B A E of the squared errors (`loss_weights`), or None.
    """

    obs: Observation
    actions: jax.Array
    noise: jax.Array
    time: jax.Array
    weights: jax.Array | None = None


def draw(augment_fn: AugmentFn, batch: Batch, step_rng: jax.Array) -> Drawn:
    """Augmentation, noise and time from the step's key.

    Args:
        augment_fn: (key, camera -> B H W 3 uint8) -> camera -> B H W 3 float32 in [-1, 1].
        batch: images uint8.
        step_rng: the step's key.
    """
    preprocess_rng, noise_rng, time_rng = jax.random.split(step_rng, 3)
    obs = dataclasses.replace(batch.observation, images=augment_fn(preprocess_rng, batch.observation.images))
    noise, time = draw_noise_time(noise_rng, time_rng, batch.actions.shape)
    weights = loss_weights(batch.action_mask)
    return Drawn(obs=obs, actions=batch.actions, noise=noise, time=time, weights=weights)


def mean_loss(model: VelocityModel, drawn: Drawn) -> jax.Array:
    """The mean over samples and steps of `flow_matching_loss`, over what counts: scalar float32."""
    return jnp.mean(flow_matching_loss(model, drawn.obs, drawn.actions, drawn.noise, drawn.time, drawn.weights))


def make_loss_fn(bind: Callable[[Params], VelocityModel], augment_fn: AugmentFn) -> LossFn:
    """The step's scalar loss.

    Args:
        bind: parameter tree -> model.
        augment_fn: see `draw`.

    Returns:
        loss_fn(params, batch, step_rng) -> scalar float32.
    """

    def loss_fn(params: Params, batch: Batch, step_rng: jax.Array) -> jax.Array:
        return mean_loss(bind(params), draw(augment_fn, batch, step_rng))

    return loss_fn
