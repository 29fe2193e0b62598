"""Times writing and reading a checkpoint.

python scripts/bench_checkpoint.py CONFIG [--folder DIR] [--whole] [--saves N] [train options]
"""

import sys

import _entry

from openpi_accel.tools.bench_checkpoint import main

if __name__ == "__main__":
    _entry.run(lambda: main(sys.argv[1:]))
