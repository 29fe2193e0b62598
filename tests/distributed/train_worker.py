"""scripts/train.py with sizes for tests: one process of a whole run of the tiny model, started by the tests.

python -m tests.distributed.train_worker SHARES CONFIG [options of scripts/train.py]. SHARES gets a line for each batch:
[its first sample, the rows that this process takes].
"""

import functools
import json
import os
import pathlib
import sys

import jax
import numpy as np

from openpi_accel import cli, training_run
from openpi_accel.build.training import build_training
from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.data.loader import Loader
from openpi_accel.parallel.distributed import initialize
from openpi_accel.parallel.peers import end_process
from tests.distributed.sharded_step import MIN_NUM_ELEMENTS, QUICK

# As few operations to compile as there can be.
ACCELERATION = Acceleration(batch_cameras=True, skip_images=("auto",))


def main() -> int:
    config = parse_train_config(sys.argv[2:], prog="train_worker", description="A tiny run.")
    jax.config.update("jax_num_cpu_devices", 1)
    initialize(os.environ, timeout_s=300)
    jax.config.update("jax_threefry_partitionable", True)
    # At full size every kernel is sharded; the tiny ones lie below the usual threshold.
    training_run.build_training = functools.partial(build_training, min_num_elements=MIN_NUM_ELEMENTS)  # type: ignore[assignment]
    compile_step = jax.stages.Lowered.compile
    jax.stages.Lowered.compile = lambda self: compile_step(self, QUICK)  # type: ignore[method-assign,assignment]
    share = Loader._share
    with pathlib.Path(sys.argv[1]).open("a") as log:

        def noted(self: Loader, first: int) -> np.ndarray:
            rows = share(self, first)
            print(json.dumps([first, rows.tolist()]), file=log, flush=True)
            return rows

        Loader._share = noted  # type: ignore[method-assign]
        return training_run.train(config, ACCELERATION, Environment.from_env({})).exit_code


if __name__ == "__main__":
    cli.run(main, end_process)
