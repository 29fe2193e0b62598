"""Shows what a LeRobot dataset holds: python scripts/inspect_dataset.py PATH [--check] [--rows 0,5,77] [--json]"""

import os
import sys

import _entry

from openpi_accel.tools.inspect_dataset import main

if __name__ == "__main__":
    _entry.run(lambda: main(sys.argv[1:], os.environ))
