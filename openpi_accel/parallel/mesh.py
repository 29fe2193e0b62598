"""The device mesh, made in this one place: axes ("batch", "fsdp"), a batch being split over both."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from openpi_accel.errors import UserError

BATCH_AXIS, FSDP_AXIS = "batch", "fsdp"


def make_mesh(fsdp_devices: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of all `devices` (default: every device of every process), parameters sharded over `fsdp_devices` of them.

    Axis types are automatic: under explicit ones, the default of jax.make_mesh, indexing a sharded table fails.

    Raises:
        UserError: see `arrange`.
    """
    devices = list(jax.devices() if devices is None else devices)
    return Mesh(arrange(devices, fsdp_devices), (BATCH_AXIS, FSDP_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def arrange(devices: Sequence[jax.Device], fsdp_devices: int) -> np.ndarray:
    """The devices as an array [groups, fsdp_devices]: a group holds one copy of the parameters.

    The gathers of every layer run within a group, so groups never straddle processes (a process is a node): each lies
    within one, or, where `fsdp_devices` is larger, fills several. Between groups only gradients move.

    Raises:
        UserError: fsdp_devices divides neither the devices of a process, nor is a multiple of them that divides all.
    """
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    local = sum(device.process_index == ordered[0].process_index for device in ordered)
    fitting = [n for n in range(1, len(ordered) + 1) if len(ordered) % n == 0 and (local % n == 0 or n % local == 0)]
    if fsdp_devices not in fitting:
        choices = ", ".join(map(str, fitting))
        several = local < len(ordered)
        nodes = f" on {len(ordered) // local} nodes of {local}" if several else ""
        raise UserError(
            f"--fsdp-devices is {fsdp_devices}, but there are {len(ordered)} devices{nodes}, which cannot be split "
            f"into groups of that size{' without a group that straddles nodes' if several else ''}. "
            f"Choose one of: {choices}."
        )
    array = np.empty(len(ordered), object)
    array[:] = ordered
    return array.reshape(-1, fsdp_devices)


def check_batch_size(batch_size: int, num_devices: int, num_processes: int = 1) -> None:
    """A global batch is split evenly over all devices and all processes.

    Raises:
        UserError: it cannot be; names the nearest batch sizes that can.
    """
    unit = math.lcm(num_devices, num_processes)
    if batch_size % unit == 0:
        return
    lower, upper = batch_size // unit * unit, (batch_size // unit + 1) * unit
    choices = f"--batch-size={upper}" if lower == 0 else f"--batch-size={lower} or --batch-size={upper}"
    raise UserError(
        f"--batch-size {batch_size} cannot be split evenly over {num_devices} devices"
        + (f" of {num_processes} processes" if num_processes > 1 else "")
        + f". Use {choices}."
    )
