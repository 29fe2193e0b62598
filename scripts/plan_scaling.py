"""Predicts speed and memory on many GPUs: python scripts/plan_scaling.py [CONFIG] [--nodes 1 2 4] [--fsdp-devices N]"""

import os
import sys

import _entry

from openpi_accel.tools.scaling.command import main

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # shapes alone; a GPU in use stays untouched
    _entry.run(lambda: main(sys.argv[1:]))
