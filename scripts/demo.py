"""The demo: python scripts/demo.py pi05_demo --exp-name=NAME [--options] [--with-control | --only-train]."""

import os
import sys

import _entry
import jax

from openpi_accel.tools.demo import main

if __name__ == "__main__":
    # Upstream's random numbers; other values of this setting give other ones.
    jax.config.update("jax_threefry_partitionable", True)
    _entry.run(lambda: main(sys.argv[1:], os.environ))
