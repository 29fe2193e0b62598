"""Is this node ready to train? python scripts/doctor.py [CONFIG [train options]] [--quick] [--json]"""

import os
import sys

import _entry

from openpi_accel.tools.doctor.command import main

if __name__ == "__main__":
    # A look must not take the whole GPU from whoever computes there.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    _entry.run(lambda: main(sys.argv[1:], os.environ))
