"""What the training step of a configuration needs on each device, computed from the traced step alone."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from openpi_accel.build.training import build_ops, build_training
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig, WeightLoaderConfig
from openpi_accel.models.ops import Ops
from openpi_accel.parallel.mesh import BATCH_AXIS, FSDP_AXIS, make_mesh
from openpi_accel.parallel.sharding import state_shardings
from openpi_accel.tools.bench import random_batch
from openpi_accel.tools.plan import fused_attention
from openpi_accel.tools.plan.liveness import Timeline, timeline
from openpi_accel.tools.plan.program import flatten
from openpi_accel.tools.plan.sharded import spread
from openpi_accel.train.memory import StepMemory
from openpi_accel.types import TrainState

# Bytes are linear in the samples of a microbatch, so two of them tell all.
_SAMPLES = (2, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory of one step for any batch and any sharding.

    Attributes:
        state: shapes of the state.
        batch_bytes: of one sample.
        alone, together: the timelines of the step at two numbers of samples per device and microbatch, for one device
            and for several.
        num_microbatches: as traced.
    """

    state: TrainState
    batch_bytes: int
    alone: tuple[Timeline, Timeline]
    together: tuple[Timeline, Timeline]
    num_microbatches: int

    def memory(self, samples_per_device: int, fsdp_devices: int, num_devices: int) -> StepMemory:
        """Of one device.

        Args:
            samples_per_device: of the whole batch; a multiple of the microbatches.
            fsdp_devices: over which the state is sharded.
            num_devices: of the mesh.
        """
        samples = samples_per_device / self.num_microbatches
        share = (samples - _SAMPLES[0]) / (_SAMPLES[1] - _SAMPLES[0])

        def bytes_at(kind: str) -> np.ndarray:
            first, second = (getattr(one, kind) for one in (self.alone if num_devices == 1 else self.together))
            return np.asarray(first + (second - first) * share)

        in_use = bytes_at("whole") + bytes_at("sharded") / fsdp_devices
        if fsdp_devices > 1:
            in_use = in_use + bytes_at("gathered")
        return StepMemory(
            state=self.state_bytes(fsdp_devices) + samples_per_device * self.batch_bytes,
            temporaries=int(in_use.max(initial=0)),
        )

    def state_bytes(self, fsdp_devices: int) -> int:
        """Of one device's share of the state."""
        shardings = state_shardings(self.state, _mesh(fsdp_devices))
        sizes = jax.tree.map(
            lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
            self.state,
            shardings,
        )
        return sum(jax.tree.leaves(sizes))


@functools.lru_cache(maxsize=64)
def footprint(config: TrainConfig, acceleration: Acceleration) -> Footprint:
    """Traces the step; batch size and fsdp of the config do not matter.

    Raises:
        UserError: the freeze filter does not fit, or the prompt length is not known.
    """
    samples = [n * config.num_microbatches for n in _SAMPLES]
    config = dataclasses.replace(
        config, batch_size=samples[0], fsdp_devices=1, weight_loader=WeightLoaderConfig(params_path=None)
    )
    training = build_training(
        config, acceleration, make_mesh(1, jax.devices()[:1]), chosen=_ops(config, acceleration)
    )
    state = training.abstract
    sample = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype),
        random_batch(dataclasses.replace(config, batch_size=1, num_microbatches=1), acceleration.skip_images),
    )
    alone, together = zip(
        *(_timelines(training.step, state, sample, n, training.train_rng) for n in samples), strict=True
    )
    assert len(alone[0].whole) == len(alone[1].whole), "the traced step depends on the batch's size"
    return Footprint(
        state=state,
        batch_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sample)),
        alone=alone,
        together=together,
        num_microbatches=config.num_microbatches,
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


def _timelines(
    step: Any, state: TrainState, sample: Any, num_samples: int, rng: jax.Array
) -> tuple[Timeline, Timeline]:
    """For one device and for several, which exchange gradients."""
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_samples, *leaf.shape[1:]), leaf.dtype), sample)
    program = flatten(jax.make_jaxpr(step)(state, batch, rng))
    leaves = jax.tree.leaves(state)
    # Sharding by any number touches the same leaves; two devices stand for all.
    shardings = jax.tree.leaves(state_shardings(state, _mesh(2)))
    sharded = [
        value
        for value, sharding in zip(program.inputs[: len(leaves)], shardings, strict=True)
        if FSDP_AXIS in sharding.spec
    ]
    follow = functools.partial(
        timeline,
        program,
        free=program.outputs[: len(leaves)],
        sharded=spread(program, sharded),
        kernels=fused_attention.KERNELS,
    )
    return follow(), follow(gradients_late=True)


def _mesh(fsdp_devices: int) -> AbstractMesh:
    return AbstractMesh((1, fsdp_devices), (BATCH_AXIS, FSDP_AXIS))
