"""Checks the variables that say which node of how many this is, for run_multinode.sh: python scripts/check_nodes.py."""

import os

import _entry

from openpi_accel.parallel.platforms import require_several


def main() -> None:
    """Silent where all is well; else one message and exit code 2."""
    require_several(os.environ)


if __name__ == "__main__":
    _entry.run(main)
