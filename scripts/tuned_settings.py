"""What scripts/tune.py found, for the launcher: python scripts/tuned_settings.py CONFIG [FILE]"""

import os
import pathlib
import sys

import _entry

from openpi_accel.tools.tune.command import settings

if __name__ == "__main__":
    _entry.run(lambda: settings(sys.argv[1:], os.environ, pathlib.Path(__file__).resolve().parents[1]))
