"""Compares two runs: python scripts/compare_runs.py A B [--html FILE] [--assert-equal] [--json]"""

import sys

from openpi_accel.cli import run
from openpi_accel.tools.compare.command import main

if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
