"""What a comparison with a golden runs. Everything of the golden is an argument, never a constant of a program, so that
goldens of the same shapes share what is compiled.

Shape letters: B batch, T tokens, A action horizon, E action dim.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from openpi_accel.config.schema import Architecture, OptimizerConfig, ScheduleConfig
from openpi_accel.data.augment import augment, to_float
from openpi_accel.models.freeze import trainable_predicate
from openpi_accel.models.ops import Ops
from openpi_accel.models.pi0 import Forward
from openpi_accel.models.pure import bind, init_params
from openpi_accel.objective import flow_matching_loss, make_loss_fn
from openpi_accel.train.optimizer import make_optimizer, make_schedule
from openpi_accel.train.step import init_state, make_train_step
from openpi_accel.types import Observation, Params, TrainState

augmented = jax.jit(augment)
"""(key, camera -> B H W 3 uint8) -> camera -> B H W 3 float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPrograms:
    """Of one model; each is compiled on its first call.

    Attributes:
        shapes: of the parameters.
        forward: (parameters, observation with uint8 images, x_t B A E, time B) -> everything of one pass, and its
            dense mask B T T.
        loss: (parameters, observation with float32 images, actions, noise, time) -> loss B A.
        loss_and_grads: the same arguments -> loss B A and the gradient of its mean.
        sample: (parameters, observation with uint8 images, noise B A E) -> actions B A E.
    """

    shapes: Params
    forward: Callable[..., tuple[Forward, jax.Array]]
    loss: Callable[..., jax.Array]
    loss_and_grads: Callable[..., tuple[jax.Array, Params]]
    sample: Callable[..., jax.Array]


@functools.lru_cache(maxsize=8)
def model_programs(arch: Architecture, ops: Ops) -> ModelPrograms:
    """Those of this model, made once."""
    model = bind(arch, ops)

    def forward(params: Params, obs: Observation, x_t: jax.Array, time: jax.Array) -> tuple[Forward, jax.Array]:
        out = model(params).forward(dataclasses.replace(obs, images=to_float(obs.images)), x_t, time)
        return out, out.mask.dense()

    @jax.jit
    def loss(params: Params, obs: Observation, actions: jax.Array, noise: jax.Array, time: jax.Array) -> jax.Array:
        return flow_matching_loss(model(params), obs, actions, noise, time)

    def mean_loss(params: Params, *rest: Any) -> tuple[jax.Array, jax.Array]:
        each = loss(params, *rest)
        return jnp.mean(each), each

    value_and_grad = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))

    def loss_and_grads(*args: Any) -> tuple[jax.Array, Params]:
        (_, each), grads = value_and_grad(*args)
        return each, grads

    def sample(params: Params, obs: Observation, noise: jax.Array) -> jax.Array:
        return model(params).sample_actions(dataclasses.replace(obs, images=to_float(obs.images)), noise)

    return ModelPrograms(
        shapes=jax.eval_shape(lambda: init_params(arch, jax.random.key(0))),
        forward=jax.jit(forward),
        loss=loss,
        loss_and_grads=loss_and_grads,
        sample=jax.jit(sample),
    )


@functools.lru_cache(maxsize=8)
def train_programs(
    arch: Architecture, ops: Ops, schedule_config: ScheduleConfig, optimizer: OptimizerConfig, ema_decay: float | None
) -> tuple[Callable[[Params], TrainState], Callable[..., tuple[TrainState, dict[str, jax.Array]]]]:
    """(parameters -> the state before the first step, the step), made once; the leaves of --freeze=auto train."""
    is_trainable = trainable_predicate("auto", model_programs(arch, ops).shapes, arch)
    schedule = make_schedule(schedule_config)
    tx = make_optimizer(optimizer, schedule)
    step = make_train_step(make_loss_fn(bind(arch, ops), augment), tx, schedule, is_trainable, ema_decay)
    # Compiled whole: leaf by leaf it is a program for every shape.
    start = jax.jit(lambda params: init_state(params, tx, is_trainable, ema_decay))
    return start, jax.jit(step)
