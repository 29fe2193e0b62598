"""Packs a run's cameras, decoded and resized: python scripts/pack_dataset.py CONFIG --data.packed FOLDER [options]"""

import os
import sys

from openpi_accel.cli import run
from openpi_accel.tools.pack_dataset import main

if __name__ == "__main__":
    run(lambda: main(sys.argv[1:], os.environ))
