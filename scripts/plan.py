"""Does a step fit? python scripts/plan.py CONFIG [train options] [--gpus 8] [--gpu-memory-gib 80] [--json]"""

import os
import sys

import _entry

from openpi_accel.tools.plan.command import main

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # shapes alone; a GPU in use stays untouched
    _entry.run(lambda: main(sys.argv[1:], os.environ))
