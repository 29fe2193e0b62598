"""Trains pi0.5 or pi0: python scripts/train.py <config> --exp-name=NAME [--options]."""

import os
import sys

import jax

from openpi_accel import cli
from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.parallel.distributed import initialize
from openpi_accel.parallel.peers import end_process


def main() -> int:
    """Reads command line and environment, trains; the exit code of the run."""
    config = parse_train_config(sys.argv[1:], prog="python scripts/train.py", description="Trains a policy.")
    acceleration = Acceleration.from_env(os.environ)
    initialize(os.environ)
    # Upstream's random numbers; other values of this setting give other ones.
    jax.config.update("jax_threefry_partitionable", True)

    from openpi_accel.training_run import run_folder_of, train

    result = train(config, acceleration, Environment.from_env(os.environ))
    if jax.process_index() == 0:
        folder = run_folder_of(config)
        left = f"checkpoints, metrics.jsonl, loss_curve.png, first_batch.png in {folder}"
        if result.unsaved:
            print(f"stopped by SIGTERM after {result.next_step} steps: {result.unsaved}; {left}")
        elif result.exit_code:
            print(f"stopped by a signal after {result.next_step} steps, saved; go on with --resume (RESUME=1); {left}")
        else:
            print(f"done: {result.next_step} steps; {left}")
    return result.exit_code


if __name__ == "__main__":
    cli.run(main, end_process)
