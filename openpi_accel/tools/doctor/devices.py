"""What JAX sees and does on this node. Importing this imports JAX."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from openpi_accel.build.training import build_training
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.parallel.sharding import batch_sharding
from openpi_accel.tools.doctor.finding import Finding
from openpi_accel.tools.doctor.limits import GIB
from openpi_accel.train.disk_space import checkpoint_bytes

SLOW_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduce:
    """One small sum over devices.

    Attributes:
        num_devices: how many took part.
        seconds: from nothing to the result, compiling and connecting included.
        correct: every device got the right sum.
    """

    num_devices: int
    seconds: float
    correct: bool


def local_platforms() -> list[str]:
    """The platform of each of this node's devices: gpu or cpu."""
    return [device.platform for device in jax.local_devices()]


def jax_devices(num_gpus: int, platforms: Callable[[], Sequence[str]] = local_platforms) -> Finding:
    """Whether JAX sees the GPUs that nvidia-smi sees.

    Args:
        num_gpus: that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves; 0 for a run on the CPU.
        platforms: as `local_platforms`.
    """
    try:
        found = list(platforms())
    except RuntimeError as error:  # a backend that does not start
        advice = "Check the driver against JAX's CUDA, and LD_LIBRARY_PATH for other CUDA libraries (unset it)."
        return Finding(name="JAX devices", level="error", seen=f"JAX does not start: {error}", advice=advice)
    seen = ", ".join(f"{found.count(platform)} x {platform}" for platform in dict.fromkeys(found))
    if found.count("gpu") == num_gpus:
        return Finding(name="JAX devices", level="ok", seen=seen)
    advice = "Check that JAX has its CUDA plugin (requirements/cuda12.txt or cuda13.txt), JAX_PLATFORMS and "
    advice += "CUDA_VISIBLE_DEVICES."
    return Finding(name="JAX devices", level="error", seen=f"{seen}; nvidia-smi has {num_gpus} GPUs", advice=advice)


def time_all_reduce() -> AllReduce:
    """Sums one number per local device, each another, so that a wrong or missing one shows."""
    start = time.perf_counter()
    mesh = make_mesh(1, jax.local_devices())
    values = jax.device_put(np.arange(1, mesh.size + 1, dtype=np.float32), batch_sharding(mesh))
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(values)
    sums = [float(shard.data) for shard in total.addressable_shards]
    return AllReduce(
        num_devices=mesh.size,
        seconds=time.perf_counter() - start,
        correct=sums == [mesh.size * (mesh.size + 1) / 2] * mesh.size,
    )


def first_collective(reduce: Callable[[], AllReduce] = time_all_reduce) -> Finding:
    """Whether this node's devices can add up numbers together, and how long the first time takes."""
    try:
        done = reduce()
    except RuntimeError as error:
        advice = "Set NCCL_DEBUG=INFO and run this again; NCCL's own words name the cause."
        return Finding(name="first all-reduce", level="error", seen=f"it fails: {error}", advice=advice)
    seen = f"{done.seconds:.1f} s over {done.num_devices} devices"
    if not done.correct:
        advice = "The link between GPUs corrupts data (IOMMU or ACS on PCIe?). Try NCCL_P2P_DISABLE=1."
        return Finding(name="first all-reduce", level="error", seen=f"{seen}: a wrong sum", advice=advice)
    if done.seconds > SLOW_S:
        advice = "Set NCCL_DEBUG=INFO and run this again to see what it waits for; look at GPU use above."
        return Finding(name="first all-reduce", level="warning", seen=f"{seen} (above {SLOW_S:g} s)", advice=advice)
    return Finding(name="first all-reduce", level="ok", seen=seen)


def checkpoint_gib(config: TrainConfig) -> float:
    """Size of one checkpoint of this run before compression, from shapes alone."""
    training = build_training(config, Acceleration(), make_mesh(1, jax.local_devices()[:1]))
    return checkpoint_bytes(training.abstract) / GIB
