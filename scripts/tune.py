"""Searches the fastest setting on this machine: python scripts/tune.py CONFIG [train options] [--budget-min 8]"""

import os
import pathlib
import sys

import _entry


def main() -> int:
    """Searches; the trials are processes of their own that use the GPUs, this one does not."""
    environment = dict(os.environ)
    os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads it when it is imported
    from openpi_accel.tools.tune.command import main

    return main(sys.argv[1:], environment, pathlib.Path(__file__).resolve().parents[1])


if __name__ == "__main__":
    _entry.run(main)
