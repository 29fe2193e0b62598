"""Trains pi0.5 or pi0: python scripts/train.py <config> --exp-name=NAME [--options]."""

import os
import signal
import sys

import _entry
import jax

from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.resumed import resume_command
from openpi_accel.errors import UserError
from openpi_accel.parallel.distributed import initialize, tell_others
from openpi_accel.parallel.peers import end_process


def main() -> int:
    """Reads command line and environment, trains; the exit code of the run."""
    try:
        config = parse_train_config(sys.argv[1:], prog="python scripts/train.py", description="Trains a policy.")
        acceleration = Acceleration.from_env(os.environ)
    except (UserError, SystemExit) as error:
        if isinstance(error, UserError):
            tell_others(os.environ, str(error))
        elif error.code:
            tell_others(os.environ, "its command line was not understood; its own log says why.")
        raise
    from openpi_accel.training_run import run_folder_of, train  # slow, or broken on one node: before the others wait

    def ended(number: int, frame: object) -> None:  # a container's first process would not hear of it otherwise
        print("SIGTERM before training began, so there is nothing to save", file=sys.stderr, flush=True)
        sys.exit(config.preempt_exit_code)

    signal.signal(signal.SIGTERM, ended)  # JAX's handler or the guard's takes its place
    initialize(os.environ)
    # Upstream's random numbers; other values of this setting give other ones.
    jax.config.update("jax_threefry_partitionable", True)

    result = train(config, acceleration, Environment.from_env(os.environ))
    if jax.process_index() == 0:
        folder = run_folder_of(config)
        left = f"checkpoints, metrics.jsonl, loss_curve.png, first_batch.png in {folder}"
        if result.unsaved or result.exit_code:
            how = f"stopped by SIGTERM after {result.next_step} steps: {result.unsaved}"
            saved = f"stopped by a signal after {result.next_step} steps, saved"
            print(f"{how if result.unsaved else saved}; {left}")
            command = resume_command(config, "scripts/train.py")
            print(f"go on with: {command} (or the launcher of before: RESUME=1 EXP_NAME={config.exp_name})")
        elif result.state is not None:  # else nothing was left to do, as was said
            print(f"done: {result.next_step} steps; {left}")
    return result.exit_code


if __name__ == "__main__":
    _entry.run(main, end_process)
