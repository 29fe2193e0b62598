"""Predicted against recorded actions: python scripts/eval_open_loop.py CHECKPOINT --data PATH [--json]"""

import os
import sys

import _entry
import jax

from openpi_accel.tools.eval_open_loop import main

if __name__ == "__main__":
    jax.config.update("jax_threefry_partitionable", True)
    _entry.run(lambda: main(sys.argv[1:], os.environ))
