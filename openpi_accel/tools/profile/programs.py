"""The training step cut into programs that can be timed one by one, on the run's own shapes and shardings."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from openpi_accel import tree
from openpi_accel.accel.microbatch import split_batch
from openpi_accel.build.training import Training
from openpi_accel.data.augment import augment
from openpi_accel.objective import draw
from openpi_accel.parallel.sharding import batch_sharding, replicated
from openpi_accel.train.loop import compile_ahead
from openpi_accel.train.start import shardings_of
from openpi_accel.types import TrainState

DRAW, FORWARD, GRADIENT, UPDATE, STEP = "draw", "forward", "gradient", "update", "step"
_NUM_WARMUP = 2


class Programs:
    """The compiled programs, and the state that they run on.

    draw: augmentation, noise and time. forward: these and the loss. gradient: these, the loss and its gradient.
    update: the step with the gradient handed in (optimizer, average, norms). step: all of it.

    Args:
        training: the functions of the run.
        state: on the devices; belongs to this object from here on.
        batch: a global batch on the devices.
        num_microbatches: as the step has it.
        mesh: the devices.
    """

    def __init__(self, training: Training, state: TrainState, batch: Any, num_microbatches: int, mesh: Mesh) -> None:
        self.state = state
        self._batch, self._rng = batch, training.train_rng
        everywhere, over_samples = replicated(mesh), batch_sharding(mesh)
        shardings = shardings_of(training.abstract)
        of_trainable = tree.split(shardings.params, training.is_trainable)[0]
        sample = functools.partial(draw, augment)

        def forward(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
            if num_microbatches == 1:
                return training.loss_fn(params, batch, rng)
            parts = jax.tree.map(lambda leaf: split_batch(leaf, num_microbatches), sample(batch, rng))
            return jnp.mean(jax.lax.map(lambda part: training.loss_fn(params, part, rng), parts))

        inputs = (shardings.params, over_samples, everywhere)
        arguments = (training.abstract.params, batch, training.train_rng)
        self._draw = jax.jit(sample, in_shardings=inputs[1:]).lower(*arguments[1:]).compile()
        self._forward = jax.jit(forward, in_shardings=inputs, out_shardings=everywhere).lower(*arguments).compile()
        gradient = jax.jit(training.gradient, in_shardings=inputs, out_shardings=(everywhere, of_trainable))
        self._gradient = gradient.lower(*arguments).compile()
        handed_in = training.make_step(lambda _: lambda trainable, grads, rng: (jnp.float32(0), grads))
        update = jax.jit(
            handed_in,
            in_shardings=(shardings, of_trainable, everywhere),
            out_shardings=(shardings, everywhere),
            donate_argnums=0,
        )
        trainable = tree.split(training.abstract.params, training.is_trainable)[0]
        self._update = update.lower(training.abstract, trainable, training.train_rng).compile()
        self._grads: Any = None
        self.step = compile_ahead(training.step, mesh, training.abstract, batch, training.train_rng)
        self.drawn_bytes = sum(x.nbytes for x in jax.tree.leaves(self._draw(batch, training.train_rng)))

    def time(self, repeats: int) -> dict[str, list[float]]:
        """Seconds of every program, `repeats` times each, taken in turns so that a drift meets all alike."""
        return time_in_turns(
            {
                DRAW: lambda: self._draw(self._batch, self._rng),
                FORWARD: lambda: self._forward(self.state.params, self._batch, self._rng),
                GRADIENT: self._run_gradient,
                UPDATE: self._run_update,
                STEP: self.run_step,
            },
            repeats,
        )

    def run_step(self, batch: Any = None) -> Any:
        """One step on `batch`, or on the one at hand; its metrics."""
        self.state, metrics = self.step(self.state, self._batch if batch is None else batch, self._rng)
        return metrics

    def run_other(self, step: jax.stages.Compiled, batch: Any) -> Any:
        """A step that was built otherwise, on this state."""
        self.state, metrics = step(self.state, batch, self._rng)
        return metrics

    def _run_gradient(self) -> Any:
        self._grads = None  # two gradients at once need not fit
        _, self._grads = self._gradient(self.state.params, self._batch, self._rng)
        return self._grads

    def _run_update(self) -> Any:
        self.state, metrics = self._update(self.state, self._grads, self._rng)
        return self.state, metrics

    def drop_gradient(self) -> None:
        """Frees its memory."""
        self._grads = None


def time_in_turns(programs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, the devices idle before it and done after it."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for round_number in range(_NUM_WARMUP + repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            if round_number >= _NUM_WARMUP:
                times[name].append(time.perf_counter() - start)
    return times


def median(times: list[float]) -> float:
    """Of the seconds."""
    return statistics.median(times)
