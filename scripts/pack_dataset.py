"""Packs a run's cameras, decoded and resized: python scripts/pack_dataset.py CONFIG --data.packed FOLDER [options]"""

import os
import sys

import _entry

from openpi_accel.tools.pack_dataset import main

if __name__ == "__main__":
    _entry.run(lambda: main(sys.argv[1:], os.environ))
