"""A step that does not fit is refused before weights are loaded, with settings that would fit."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_accel.errors import UserError
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.train import start
from openpi_accel.train.loop import abstract_batch, compile_ahead
from openpi_accel.train.memory import StepMemory, device_limit, peak_memory_gib, require_memory, step_memory
from openpi_accel.train.step import make_train_step
from tests.unit import toy

GIB = 2**30


def refusal(need: StepMemory, limit: float, **settings: int) -> str:
    with pytest.raises(UserError) as caught:
        require_memory(need, int(limit * GIB), **settings)
    return str(caught.value)


def test_the_compilers_account_holds_state_and_batch() -> None:
    mesh = make_mesh(1, jax.devices()[:1])
    abstract = start.abstract_state(toy.init_params, toy.TX, toy.everything, 0.9, mesh)
    local = jax.tree.map(lambda x: x[:1], next(toy.batches()).batch)
    batch = abstract_batch(local, 4096, mesh)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(batch)} == {4096}
    step = make_train_step(toy.loss_fn, toy.TX, toy.SCHEDULE, toy.everything, 0.9)
    need = step_memory(compile_ahead(step, mesh, abstract, batch, jax.random.key(0)))
    assert need is not None
    arguments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((abstract, batch)))
    assert arguments <= need.state < arguments + 1024
    larger = abstract_batch(local, 8192, mesh)
    twice = step_memory(compile_ahead(step, mesh, abstract, larger, jax.random.key(0)))
    assert twice is not None and twice.temporaries > 1.5 * need.temporaries > 0
    assert device_limit(jax.devices()[0]) is None  # the CPU sets none
    require_memory(need, None, batch_size=4096, num_microbatches=1, fsdp_devices=1, num_devices=1)


def test_what_would_fit_is_computed() -> None:
    need = StepMemory(state=50 * GIB, temporaries=100 * GIB)
    require_memory(need, 150 * GIB, batch_size=64, num_microbatches=1, fsdp_devices=1, num_devices=1)
    message = refusal(need, 100, batch_size=64, num_microbatches=1, fsdp_devices=1, num_devices=1)
    assert "needs 150.0 GiB on each device: 50.0 GiB of state and batch, 100.0 GiB within the step" in message
    assert "JAX may use 100.0 GiB" in message and "XLA_PYTHON_CLIENT_MEM_FRACTION" in message
    assert "--num-microbatches 2, or --batch-size 32." in message and "--fsdp-devices" not in message
    in_parts = refusal(need, 100, batch_size=64, num_microbatches=2, fsdp_devices=1, num_devices=8)
    assert "--num-microbatches 4" in in_parts and "--batch-size 32" in in_parts
    assert "--fsdp-devices" not in in_parts  # 100 GiB within the step would be too much even without any state


def test_a_state_that_fits_no_device_is_to_be_sharded() -> None:
    need = StepMemory(state=120 * GIB, temporaries=20 * GIB)
    message = refusal(need, 60, batch_size=64, num_microbatches=1, fsdp_devices=1, num_devices=8)
    assert "--fsdp-devices 4" in message
    assert "--num-microbatches" not in message and "--batch-size" not in message
    alone = refusal(need, 60, batch_size=64, num_microbatches=1, fsdp_devices=1, num_devices=1)
    assert "adapters" in refusal(
        need, 60, batch_size=64, num_microbatches=1, fsdp_devices=1, num_devices=1, further=("adapters",)
    )
    assert "--fsdp-devices" not in alone and "a device with more memory" in alone


def test_a_batch_that_does_not_divide_is_not_proposed() -> None:
    need = StepMemory(state=10 * GIB, temporaries=30 * GIB)
    message = refusal(need, 20, batch_size=8, num_microbatches=1, fsdp_devices=1, num_devices=8)
    assert "--num-microbatches" not in message and "--batch-size" not in message


def test_a_batch_of_any_dtype_keeps_it() -> None:
    mesh = make_mesh(1, jax.devices()[:1])
    batch = abstract_batch({"image": jnp.zeros((1, 2, 2, 3), jnp.uint8), "mask": None}, 6, mesh)
    assert batch["image"].shape == (6, 2, 2, 3) and batch["image"].dtype == jnp.uint8 and batch["mask"] is None


def test_the_peak_of_this_process_is_its_resident_memory() -> None:
    before = peak_memory_gib()
    assert set(before) == {"host_memory_peak_gib"}  # the CPU's devices do not tell
    held = np.ones(3 << 27, np.uint8)  # 384 MiB
    now = resident_gib()
    after = peak_memory_gib()["host_memory_peak_gib"]
    assert held.any() and after >= 0.95 * now
    assert before["host_memory_peak_gib"] <= after < 1000


def resident_gib() -> float:
    """What the kernel says now."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 2**20
