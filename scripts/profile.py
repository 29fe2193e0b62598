"""Where a step's time goes: python scripts/profile.py CONFIG [--measure-switches] [--trace DIR] [--json]"""

import os
import sys

import _entry
import jax

from openpi_accel.tools.profile.command import main

if __name__ == "__main__":
    jax.config.update("jax_threefry_partitionable", True)
    _entry.run(lambda: main(sys.argv[1:], os.environ))
