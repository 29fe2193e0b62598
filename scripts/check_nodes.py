"""Checks the variables that say which node of how many this is, for run_multinode.sh: python scripts/check_nodes.py.

With --tell-others TEXT it lets the other nodes know why this one will not start, so that they need not wait for it.
"""

import argparse
import os

import _entry

from openpi_accel.parallel.platforms import require_several


def main() -> None:
    """Silent where all is well; else one message and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tell-others", metavar="TEXT")
    arguments = parser.parse_args()
    require_several(os.environ)
    if arguments.tell_others:
        from openpi_accel.parallel.distributed import tell_others  # imports JAX

        tell_others(os.environ, arguments.tell_others)


if __name__ == "__main__":
    _entry.run(main)
