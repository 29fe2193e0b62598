"""Predicts speed and memory on many GPUs: python scripts/plan_scaling.py [CONFIG] [--nodes 1 2 4] [--fsdp-devices N]"""

import os
import sys

import _entry


def main() -> None:
    """Predicts on the CPU: shapes alone are computed, and a GPU in use stays untouched."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads it when it is imported
    from openpi_accel.tools.scaling.command import main

    main(sys.argv[1:])


if __name__ == "__main__":
    _entry.run(main)
