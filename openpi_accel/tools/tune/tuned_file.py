"""The file that a search leaves and `run_opt.sh --tuned` reads."""

import dataclasses
import json
import os
import pathlib
import subprocess
from collections.abc import Mapping
from typing import Any

from openpi_accel.errors import UserError
from openpi_accel.tools.doctor.gpus import Run, query, visible

_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a setting was found on.

    Attributes:
        device: the GPUs' name, or cpu.
        num_devices: how many.
        memory_gib: of one; None where it is not told.
    """

    device: str
    num_devices: int
    memory_gib: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was found.

    Attributes:
        config: name.
        device, num_devices: where.
        code: hash of the package's modules.
        environment, arguments: switches, and options of scripts/train.py.
        found: figures and the table of what was tried, for people.
    """

    config: str
    device: str
    num_devices: int
    code: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...]
    found: Mapping[str, Any]


def look(run: Run, env: Mapping[str, str]) -> Hardware:
    """The devices that training would use here, without taking them.

    Args:
        run: runs a command, see doctor.gpus.Run.
        env: JAX_PLATFORMS and CUDA_VISIBLE_DEVICES.

    Raises:
        UserError: GPUs of several kinds.
    """
    try:
        gpus = [] if env.get("JAX_PLATFORMS") == "cpu" else visible(query(run), env)
    except (OSError, subprocess.SubprocessError):
        gpus = []
    if not gpus:
        return Hardware(device="cpu", num_devices=1, memory_gib=None)
    kinds = sorted({gpu.name for gpu in gpus})
    if len(kinds) > 1:
        raise UserError(f"the GPUs here are of several kinds ({', '.join(kinds)}): choose by CUDA_VISIBLE_DEVICES.")
    totals = [gpu.total_mib for gpu in gpus if gpu.total_mib is not None]
    return Hardware(device=kinds[0], num_devices=len(gpus), memory_gib=min(totals) / 1024 if totals else None)


def write(path: pathlib.Path, tuned: Tuned) -> None:
    """Aside first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps({"version": _VERSION, **dataclasses.asdict(tuned)}, indent=1) + "\n")
    os.replace(aside, path)


def read(path: pathlib.Path, config: str, hardware: Hardware, code: str) -> Tuned:
    """A file for this config, these devices and this code.

    Raises:
        UserError: it is missing, broken, or was made for others.
    """
    again = f"Search again: python scripts/tune.py {config}"
    if not path.is_file():
        raise UserError(f"{path} does not exist. {again}")
    try:
        values = json.loads(path.read_text())
        version = values.pop("version")
        tuned = Tuned(**values | {"arguments": tuple(values["arguments"])})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not what scripts/tune.py writes ({error}). {again}") from error
    expected = {
        "config": (tuned.config, config),
        "device": (tuned.device, hardware.device),
        "number of devices": (tuned.num_devices, hardware.num_devices),
        "code": (tuned.code[:12], code[:12]),
        "version": (version, _VERSION),
    }
    other = [f"{name} is {there}, here {here}" for name, (there, here) in expected.items() if there != here]
    if other:
        raise UserError(f"{path} was made for others: {'; '.join(other)}. {again}")
    return tuned
