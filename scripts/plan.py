"""Does a step fit? python scripts/plan.py CONFIG [train options] [--gpus 8] [--gpu-memory-gib 80] [--json]"""

import os
import sys

import _entry


def main() -> int:
    """Plans on the CPU: shapes alone are computed, and a GPU in use stays untouched."""
    environment = dict(os.environ)
    os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads it when it is imported
    from openpi_accel.tools.plan.command import main

    return main(sys.argv[1:], environment)


if __name__ == "__main__":
    _entry.run(main)
