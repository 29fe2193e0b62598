"""The demo: python scripts/demo.py pi05_demo --exp-name=NAME [--options] [--with-control]."""

import os
import sys

import jax

from openpi_accel.cli import run
from openpi_accel.tools.demo import main

if __name__ == "__main__":
    # Upstream's random numbers; other values of this setting give other ones.
    jax.config.update("jax_threefry_partitionable", True)
    run(lambda: main(sys.argv[1:], os.environ))
