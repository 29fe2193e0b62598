"""Compares two runs: python scripts/compare_runs.py A B [--html FILE] [--assert-equal] [--json]"""

import sys

import _entry

from openpi_accel.tools.compare.command import main

if __name__ == "__main__":
    _entry.run(lambda: main(sys.argv[1:]))
