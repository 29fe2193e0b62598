"""Shows what a checkpoint holds: python scripts/inspect_checkpoint.py PATH [--compare OTHER] [--json]"""

import sys

import _entry

from openpi_accel.tools.inspect_checkpoint import main

if __name__ == "__main__":
    _entry.run(lambda: main(sys.argv[1:]))
