"""Computes normalisation statistics: python scripts/compute_norm_stats.py --config-name=pi05_libero --data.path=…"""

import os
import sys

import _entry

from openpi_accel.tools.compute_norm_stats import main

if __name__ == "__main__":
    _entry.run(lambda: main(sys.argv[1:], os.environ))
