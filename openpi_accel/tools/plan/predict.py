"""What the training step of a configuration needs on each device, computed from the traced step alone."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from openpi_accel.build.training import build_ops, build_training
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig, WeightLoaderConfig
from openpi_accel.models.ops import Ops
from openpi_accel.parallel.mesh import BATCH_AXIS, FSDP_AXIS, make_mesh
from openpi_accel.parallel.sharding import state_shardings
from openpi_accel.tools.bench import random_batch
from openpi_accel.tools.plan import fused_attention
from openpi_accel.tools.plan.liveness import Timeline, timeline
from openpi_accel.tools.plan.program import Program, flatten
from openpi_accel.tools.plan.sharded import spread
from openpi_accel.train.memory import StepMemory
from openpi_accel.types import TrainState

# Bytes are linear in the samples of a microbatch, so two of them tell all; the larger one tells the order.
_SAMPLES = (4, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory of one step for any batch and any sharding.

    Attributes:
        state: shapes of the state.
        batch_bytes: of one sample.
        num_cameras: that go through the vision tower.
        trace: gives `timelines`; takes seconds.
        in_parts: traced with two microbatches, which stand for any number of them.
    """

    state: TrainState
    batch_bytes: int
    num_cameras: int
    trace: Callable[[], tuple[Timeline, Timeline]]
    in_parts: bool

    @functools.cached_property
    def timelines(self) -> tuple[Timeline, Timeline]:
        """Of the step at two numbers of samples per device and microbatch; traced for the first that asks."""
        return self.trace()

    def memory(self, samples_per_device: int, num_microbatches: int, fsdp_devices: int) -> StepMemory:
        """Of one device.

        Args:
            samples_per_device: of the whole batch; a multiple of the microbatches.
            num_microbatches: 1 exactly where not `in_parts`.
            fsdp_devices: over which the state is sharded.
        """
        assert (num_microbatches > 1) == self.in_parts
        samples = samples_per_device // num_microbatches
        state = self.state_bytes(fsdp_devices) + samples_per_device * self.batch_bytes
        # Augmented images (float32) are drawn for the whole batch; two microbatches of it are in the trace.
        further = max(0, samples_per_device - 2 * samples) * self.batch_bytes * 4
        within = _peak(self.timelines, samples, fsdp_devices) + further
        # Before the first step weights are in float32, and then rounded where they are frozen.
        unrounded = self._bytes(fsdp_devices, lambda leaf: 4 * (leaf.dtype == jnp.bfloat16), self.state.params)
        return StepMemory(state=state, temporaries=max(within, unrounded))

    def state_bytes(self, fsdp_devices: int) -> int:
        """The state alone, on one device; needs no trace."""
        return self._bytes(fsdp_devices, lambda leaf: leaf.dtype.itemsize, self.state)

    def _bytes(self, fsdp_devices: int, itemsize: Callable[[Any], int], tree: Any) -> int:
        def share(leaf: Any, sharding: NamedSharding) -> int:
            return math.prod(sharding.shard_shape(leaf.shape)) * itemsize(leaf)

        return sum(jax.tree.leaves(jax.tree.map(share, tree, state_shardings(tree, _mesh(fsdp_devices)))))


def _peak(timelines: tuple[Timeline, Timeline], samples: int, fsdp_devices: int) -> int:
    share = (samples - _SAMPLES[0]) / (_SAMPLES[1] - _SAMPLES[0])

    def in_use(timeline: Timeline) -> np.ndarray:
        gathered = timeline.gathered if fsdp_devices > 1 else 0
        return np.asarray(timeline.whole + timeline.sharded / fsdp_devices + gathered)

    first, second = map(in_use, timelines)
    return int((first + (second - first) * share).max(initial=0))


@functools.lru_cache(maxsize=64)
def footprint(config: TrainConfig, acceleration: Acceleration) -> Footprint:
    """Builds the step. To trace once what is the same, the config should be `same_trace`.

    Raises:
        UserError: the freeze filter does not fit, or the prompt length is not known.
    """
    config = same_trace(config)
    samples = [n * config.num_microbatches for n in _SAMPLES]
    mesh = make_mesh(1, jax.devices()[:1])
    training = build_training(config, acceleration, mesh, chosen=_ops(config, acceleration))
    state = training.abstract
    sample = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype),
        random_batch(config, acceleration.skip_images),
    )

    def trace() -> tuple[Timeline, Timeline]:
        small, large = (_trace(training.step, state, sample, n, training.train_rng) for n in samples)
        leaves = jax.tree.leaves(state)
        # Sharding by any number touches the same leaves; two devices stand for all.
        sharded = [FSDP_AXIS in sharding.spec for sharding in jax.tree.leaves(state_shardings(state, _mesh(2)))]
        layout = spread(large, list(itertools.compress(large.inputs, sharded)))
        lives = functools.partial(
            timeline, large, free=large.outputs[: len(leaves)], sharded=layout, kernels=fused_attention.KERNELS
        )
        return lives(sizes=small), lives(sizes=large)

    return Footprint(
        state=state,
        batch_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sample)),
        num_cameras=len(sample.observation.images),
        trace=trace,
        in_parts=config.num_microbatches > 1,
    )


def same_trace(config: TrainConfig) -> TrainConfig:
    """The config without what does not change the trace: the batch, sharding, the number of microbatches above two."""
    parts = min(2, config.num_microbatches)
    return dataclasses.replace(
        config, batch_size=parts, num_microbatches=parts, fsdp_devices=1, weight_loader=WeightLoaderConfig()
    )


def _ops(config: TrainConfig, acceleration: Acceleration) -> Ops:
    """The units that the switches choose on a GPU, where `auto` takes cuDNN in bfloat16."""
    ops, _ = build_ops(config, dataclasses.replace(acceleration, flash_impl="xla"))
    if acceleration.flash_attn and acceleration.flash_impl != "xla" and config.model.dtype == "bfloat16":
        ops = dataclasses.replace(
            ops,
            gemma_attention=fused_attention.gemma_attention,
            siglip_attention=fused_attention.siglip_attention,
        )
    return ops


def _trace(step: Any, state: TrainState, sample: Any, num_samples: int, rng: jax.Array) -> Program:
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_samples, *leaf.shape[1:]), leaf.dtype), sample)
    return flatten(jax.make_jaxpr(step)(state, batch, rng))


def _mesh(fsdp_devices: int) -> AbstractMesh:
    return AbstractMesh((1, fsdp_devices), (BATCH_AXIS, FSDP_AXIS))
