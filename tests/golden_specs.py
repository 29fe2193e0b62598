"""The PartitionSpec of every parameter of the full-size pi05_libero: tests/data/partition_specs.json.

`python -m tests.golden_specs` writes it anew, after a change of the rules that is meant.
"""

import dataclasses
import json
from typing import Any

import jax

from openpi_accel import tree
from openpi_accel.build.training import build_training
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.presets import get_preset
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.types import TrainState
from tests.conftest import DATA

FILE = DATA / "partition_specs.json"
LAYOUTS = {"fsdp 8": 8, "2 x fsdp 4": 4}


def abstract_state(fsdp_devices: int) -> TrainState:
    """The state of pi05_libero at full size, over eight devices: shapes alone."""
    config = dataclasses.replace(get_preset("pi05_libero"), fsdp_devices=fsdp_devices)
    return build_training(config, Acceleration(), make_mesh(fsdp_devices)).abstract


def specs_of(params: Any) -> dict[str, list[str | None]]:
    """Path -> mesh axis per array axis; empty for replicated."""
    return {path: list(leaf.sharding.spec) for path, leaf in tree.flatten(params).items()}


def main() -> None:
    lines = {}
    for name, fsdp in LAYOUTS.items():
        rows = [f"    {json.dumps(path)}: {json.dumps(s)}" for path, s in specs_of(abstract_state(fsdp).params).items()]
        lines[name] = ",\n".join(rows)
    text = ",\n".join(f"  {json.dumps(name)}: {{\n{rows}\n  }}" for name, rows in lines.items())
    FILE.write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
