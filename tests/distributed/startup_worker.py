"""One process of the checks before training, started by the tests: python -m tests.distributed.startup_worker FOLDER.

They pass, then rank 1 alone makes a mistake (with a second argument), or a state of 400 PB is asked for. With
"readonly" as the second argument rank 1 cannot write.
"""

import os
import pathlib
import resource
import sys

import jax

from openpi_accel import cli
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import DataConfig, TrainConfig
from openpi_accel.errors import UserError
from openpi_accel.parallel.distributed import initialize
from openpi_accel.parallel.exchange import together
from openpi_accel.parallel.same_program import check_same, check_start
from openpi_accel.parallel.shared_storage import check_shared_storage
from openpi_accel.train.disk_space import check_disk_space
from openpi_accel.train.watch import LoopConfig
from openpi_accel.types import TrainState


def main() -> None:
    base = pathlib.Path(sys.argv[1])
    initialize(os.environ, timeout_s=60)
    assert jax.process_count() == 2
    data = DataConfig(repo_id="a/b", path=str(base))
    check_start(TrainConfig(name="toy", data=data, checkpoint_base_dir=str(base)), Acceleration())
    check_same({"long": "x" * 10_000})
    readonly = sys.argv[2:] == ["readonly"]
    if readonly and jax.process_index() == 1:  # for root permissions are none
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    check_shared_storage(base, timeout_s=1 if readonly else 60)
    assert _check_space(base, 1) == ""
    print("passed", flush=True)
    if len(sys.argv) > 2:
        together(_mistake_on_rank_1)
    _check_space(base, 10**17)


def _mistake_on_rank_1() -> None:
    if jax.process_index() == 1:
        raise UserError("nothing lies there")


def _check_space(base: pathlib.Path, size: int) -> str:
    leaf = jax.ShapeDtypeStruct((size,), "float32")
    state = TrainState(step=jax.ShapeDtypeStruct((), "int32"), params={"w": leaf}, opt_state=(), ema_params=None)
    schedule = LoopConfig(num_train_steps=10, batch_size=1, log_interval=1, save_interval=5)
    folder = base / "toy" / "run"
    return check_disk_space(folder, state, schedule, resume_from=None, overwrite=False, keep_period=None)


if __name__ == "__main__":
    cli.run(main)
