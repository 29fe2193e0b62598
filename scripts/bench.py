"""Times the training step: python scripts/bench.py <config> [--steps N] [--trace DIR] [train options], one JSON line.

Runs on device-resident random data of the config's shapes; the OPENPI_ switches count as in training.
"""

import argparse
import dataclasses
import json
import os
import sys

import jax

from openpi_accel import cli
from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.flags import Acceleration


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trace")
    own, rest = parser.parse_known_args()
    config = parse_train_config(rest, prog="python scripts/bench.py", description=__doc__ or "")
    jax.config.update("jax_threefry_partitionable", True)
    from openpi_accel.tools.bench import measure

    result = measure(config, Acceleration.from_env(os.environ), num_steps=max(1, own.steps), trace_dir=own.trace)
    print(json.dumps(dataclasses.asdict(result)))
    sys.stdout.flush()


if __name__ == "__main__":
    cli.run(main)
