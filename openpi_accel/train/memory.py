"""Does the step fit the devices? Known from the compiled program, before weights are loaded."""

import dataclasses
import math
import resource
import sys
from collections.abc import Sequence

import jax

from openpi_accel.errors import UserError
from openpi_accel.sizes import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory:
    """What a compiled step needs on each device, in bytes.

    Attributes:
        state: parameters, optimizer state, average and batch, which stay between steps.
        temporaries: gradients, activations and the rest of what lives within a step; grows with the batch.
    """

    state: int
    temporaries: int

    @property
    def total(self) -> int:
        """Both."""
        return self.state + self.temporaries

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.total)} on each device: {format_bytes(self.state)} of state and batch, "
            f"{format_bytes(self.temporaries)} within the step"
        )


def step_memory(compiled: jax.stages.Compiled) -> StepMemory | None:
    """By the compiler's own account; None where it gives none."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    not_in_place = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return StepMemory(state=stats.argument_size_in_bytes, temporaries=stats.temp_size_in_bytes + not_in_place)


def device_limit(device: jax.Device) -> int | None:
    """Bytes of the device that JAX may use; None where nothing sets a limit (the CPU)."""
    stats = device.memory_stats()
    return None if stats is None else stats.get("bytes_limit")


def peak_memory_gib() -> dict[str, float]:
    """The highest use so far, as a row of the log has it: of one of this process's devices, where they tell, and of
    this process's resident memory."""
    rows = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in rows if "peak_bytes_in_use" in stats]
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage's own
    host = {"host_memory_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    return host | ({"device_memory_peak_gib": max(peaks) / 2**30} if peaks else {})


def require_memory(
    need: StepMemory,
    limit: int | None,
    *,
    batch_size: int,
    num_microbatches: int,
    fsdp_devices: int,
    num_devices: int,
    further: Sequence[str] = (),
) -> None:
    """Refuses a step that the devices cannot hold.

    Args:
        need: of the compiled step.
        limit: bytes that one device gives; None is no limit.
        batch_size: global.
        num_microbatches, fsdp_devices: as configured.
        num_devices: of the mesh.
        further: what else may help this model.

    Raises:
        UserError: it does not fit; with settings that would, as far as they can be told from the sizes.
    """
    if limit is None or need.total <= limit:
        return
    advice = []
    room = limit - need.state
    if room > 0:
        # Within the step most grows with the samples computed at once.
        parts = num_microbatches * math.ceil(need.temporaries / room)
        unit = num_devices * num_microbatches
        smaller = batch_size * room // need.temporaries // unit * unit
        if batch_size % (parts * num_devices) == 0:
            advice.append(f"--num-microbatches {parts}")
        if smaller:
            advice.append(f"--batch-size {smaller}")
    wider = [n for n in range(fsdp_devices + 1, num_devices + 1) if num_devices % n == 0]
    fitting = [n for n in wider if need.state * fsdp_devices / n + need.temporaries <= limit]
    advice += [f"--fsdp-devices {fitting[0]}"] if fitting else []
    advice += further
    raise UserError(
        f"The step needs {need}. JAX may use {format_bytes(limit)} of it. What may help: "
        f"{', or '.join(advice) or 'a device with more memory'}. "
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment lets JAX use most of a device."
    )
