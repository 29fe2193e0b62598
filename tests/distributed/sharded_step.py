"""One training step of the tiny pi0.5 on any arrangement of devices, as build_training makes it.

As a program it is one process of several: python -m tests.distributed.sharded_step FSDP_DEVICES OUT.npz
"""

import argparse
import dataclasses
import functools
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from openpi_accel import tree
from openpi_accel.build.training import build_training
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import RematConfig, RematPolicy
from openpi_accel.parallel.distributed import initialize
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.parallel.sharding import batch_sharding
from openpi_accel.tools.bench import random_batch
from openpi_accel.train.loop import compile_step
from openpi_accel.train.start import shardings_of
from openpi_accel.types import TrainState
from tests.conftest import DATA
from tests.tiny import tiny_config

BATCH = 8
# Every kernel of the tiny model is sharded, norms and biases are not: as at full size with the usual threshold.
MIN_NUM_ELEMENTS = 1024
# Two cameras in one pass: one loop over the vision tower in each direction.
SKIPPED = ("right_wrist_0_rgb",)
QUICK = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step gave.

    Attributes:
        loss, grad_norm: its metrics.
        gradients: by path, clipped; whole arrays.
        params_bytes, state_bytes: on the first device of this process.
        hlo: the compiled program.
        memory: the compiler's account of it.
        abstract: shapes and shardings of the state.
    """

    loss: float
    grad_norm: float
    gradients: dict[str, np.ndarray]
    params_bytes: int
    state_bytes: int
    hlo: str
    memory: Any
    abstract: TrainState


def golden_state(abstract: TrainState) -> TrainState:
    """The goldens' parameters (every leaf shaken, so no gradient is zero), with an optimizer that has done no step."""
    with np.load(DATA / "goldens" / "pi05_tiny.params.npz") as file:
        params = tree.unflatten({name.removeprefix("params/"): file[name] for name in file.files if "params/" in name})

    def put(leaf: jax.ShapeDtypeStruct, value: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index].astype(leaf.dtype))

    zeros = jax.tree.map(lambda leaf: put(leaf, np.zeros(leaf.shape, leaf.dtype)), abstract)
    placed = jax.tree.map(put, abstract.params, params)
    return dataclasses.replace(zeros, params=placed, ema_params=jax.tree.map(put, abstract.ema_params, params))


def local_bytes(arrays: Any) -> int:
    """Of the first device's shards."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(arrays))


def run_step(
    fsdp_devices: int, num_devices: int | None = None, *, remat: RematPolicy = "full", **switches: bool
) -> StepResult:
    """One step, on all devices of all processes or on the first `num_devices`, with `switches` of Acceleration."""
    devices = jax.devices()[:num_devices]
    mesh = make_mesh(fsdp_devices, devices)
    config = tiny_config(batch_size=BATCH, fsdp_devices=fsdp_devices, remat=RematConfig(gemma=remat, siglip=remat))
    acceleration = Acceleration(batch_cameras=True, skip_images=SKIPPED, **switches)  # type: ignore[arg-type]
    training = build_training(config, acceleration, mesh, MIN_NUM_ELEMENTS)
    state = golden_state(training.abstract)
    params_bytes, state_bytes = local_bytes(state.params), local_bytes(state)
    whole = random_batch(config, SKIPPED)
    batch = jax.tree.map(
        lambda leaf: jax.make_array_from_callback(leaf.shape, batch_sharding(mesh), leaf.__getitem__), whole
    )
    jitted = compile_step(training.step, mesh, shardings_of(training.abstract))
    compiled = jitted.lower(state, batch, training.train_rng).compile(compiler_options=QUICK)
    after, metrics = compiled(state, batch, training.train_rng)
    # From zero, Adam's first average after one step is (1 - b1) times the clipped gradient.
    gradients = jax.tree.map(lambda mean: mean / (1 - config.optimizer.b1), after.opt_state[1][0].mu)
    fetch = functools.partial(multihost_utils.process_allgather, tiled=True) if jax.process_count() > 1 else np.asarray
    return StepResult(
        loss=float(metrics["loss"]),
        grad_norm=float(metrics["grad_norm"]),
        gradients={path: np.asarray(fetch(leaf)) for path, leaf in tree.flatten(gradients).items()},
        params_bytes=params_bytes,
        state_bytes=state_bytes,
        hlo=compiled.as_text(),
        memory=compiled.memory_analysis(),
        abstract=training.abstract,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fsdp_devices", type=int)
    parser.add_argument("out")
    parser.add_argument("--devices", type=int, default=4, help="CPU devices of this process")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_threefry_partitionable", True)
    cluster = initialize(os.environ, timeout_s=300)
    assert cluster is not None and jax.device_count() == args.devices * cluster.num_processes
    result = run_step(args.fsdp_devices)
    np.savez(args.out, loss=result.loss, grad_norm=result.grad_norm, **result.gradients)


if __name__ == "__main__":
    main()
