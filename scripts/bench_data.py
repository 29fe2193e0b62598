"""Times the data plane: python scripts/bench_data.py CONFIG [train options] [--workers 1,2,8] [--batches N] [--json]"""

import os
import sys

import _entry

from openpi_accel.tools.bench_data import main

if __name__ == "__main__":
    _entry.run(lambda: main(sys.argv[1:], os.environ))
