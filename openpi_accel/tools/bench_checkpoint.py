"""How long a checkpoint of a config's size takes to write and to read where the runs will lie."""

import argparse
import functools
import json
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from openpi_accel import tree
from openpi_accel.config.command_line import parse_train_config
from openpi_accel.errors import UserError
from openpi_accel.models.pure import init_params
from openpi_accel.models.weights import load_base_params
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.parallel.sharding import state_shardings
from openpi_accel.train.checkpoint import CheckpointStore, Position
from openpi_accel.types import Params, TrainState

_PROG = "python scripts/bench_checkpoint.py"


def main(argv: Sequence[str]) -> int:
    """The script: `bench_checkpoint.py CONFIG [--folder DIR] [train options]`; prints one JSON line.

    Fresh float32 parameters alone, without optimizer state and average, are written as training writes them, read as
    base weights are read, and compared. A whole checkpoint is four times as large. 1 where what was read differs.

    Raises:
        UserError: the folder cannot be written to.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", type=pathlib.Path)
    own, rest = parser.parse_known_args(argv)
    config = parse_train_config(rest, prog=_PROG, description=f"{main.__doc__}")
    base = own.folder or pathlib.Path(config.checkpoint_base_dir)
    try:
        base.mkdir(parents=True, exist_ok=True)
        folder = pathlib.Path(tempfile.mkdtemp(prefix=".bench_checkpoint.", dir=base))
    except OSError as error:
        raise UserError(f"{base} cannot be written to ({error}). Give another --folder.") from error
    try:
        report = _measure(config.fsdp_devices, functools.partial(init_params, config.model.architecture), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report))
    return 0 if report["equal"] else 1


def _measure(fsdp_devices: int, init: Callable[[jax.Array], Params], folder: pathlib.Path) -> dict[str, object]:
    key, mesh = jax.random.key(0), make_mesh(fsdp_devices)
    shapes = jax.eval_shape(init, key)
    shardings = state_shardings(shapes, mesh)
    params = jax.block_until_ready(jax.jit(init, out_shardings=shardings)(key))
    store = CheckpointStore(folder)
    try:
        start = time.perf_counter()
        state = TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=(), ema_params=None)
        store.save(0, state, Position(next_sample=0))
        blocked_s = time.perf_counter() - start
        store.wait()
        save_s = time.perf_counter() - start
    finally:
        store.close()
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    start = time.perf_counter()
    loaded, _ = load_base_params(str(folder / "0" / "params"), abstract, lambda path: False)
    jax.block_until_ready(loaded)
    load_s = time.perf_counter() - start
    written, read = tree.flatten(params), tree.flatten(loaded)
    return {
        "num_params": sum(leaf.size for leaf in written.values()),
        "bytes_on_disk": on_disk,
        "blocked_s": blocked_s,  # training stands still for so long
        "save_s": save_s,
        "load_s": load_s,
        "equal": all(bool(jnp.array_equal(written[path], read[path])) for path in written),
        "devices": jax.device_count(),
        "device": jax.devices()[0].device_kind,
    }
