"""The device mesh, made in this one place: axes ("batch", "fsdp"), a batch being split over both."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from openpi_accel.errors import UserError

BATCH_AXIS, FSDP_AXIS = "batch", "fsdp"


def make_mesh(fsdp_devices: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of all `devices` (default: every device of every process), parameters sharded over `fsdp_devices` of them.

    Axis types are automatic: jax.make_mesh's own default became explicit, under which indexing a sharded table fails.

    Raises:
        UserError: the number of devices is no multiple of fsdp_devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) % fsdp_devices:
        choices = ", ".join(str(n) for n in range(1, len(devices) + 1) if len(devices) % n == 0)
        raise UserError(
            f"--fsdp-devices is {fsdp_devices}, but there are {len(devices)} devices, which it does not divide. "
            f"Choose one of: {choices}."
        )
    shape = (len(devices) // fsdp_devices, fsdp_devices)
    return jax.make_mesh(shape, (BATCH_AXIS, FSDP_AXIS), axis_types=(AxisType.Auto, AxisType.Auto), devices=devices)


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
