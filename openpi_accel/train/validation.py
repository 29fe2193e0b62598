"""The loss on held-out data, with the same randomness every time, so that its curve shows the model alone."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from openpi_accel.parallel.sharding import batch_sharding, replicated
from openpi_accel.train.prefetch import to_devices
from openpi_accel.types import Params, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation:
    """Measures now and then.

    Attributes:
        loss_fn: (params, batch, rng) -> scalar.
        batches: this process's share of every held-out batch, numpy arrays; the same ones at every call.
        interval: steps between two measurements.
        seed: of noise and time.
        mesh: the devices.
    """

    loss_fn: Callable[[Params, Any, jax.Array], jax.Array]
    batches: Callable[[], Iterable[Any]]
    interval: int
    seed: int
    mesh: Mesh

    @functools.cached_property
    def _jitted(self) -> Callable[[Params, Any, jax.Array], jax.Array]:
        return jax.jit(self.loss_fn, out_shardings=replicated(self.mesh))

    def loss(self, state: TrainState) -> float:
        """The mean over the held-out batches, of the weights that a policy would load (averaged ones, if there are)."""
        params = state.params if state.ema_params is None else state.ema_params
        key = jax.random.key(self.seed)
        losses = [
            self._jitted(params, to_devices(batch, batch_sharding(self.mesh)), jax.random.fold_in(key, number))
            for number, batch in enumerate(self.batches())
        ]
        return sum(map(float, losses)) / len(losses)
