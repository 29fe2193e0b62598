"""How long a checkpoint of a config's size takes to write and to read where the runs will lie."""

import argparse
import dataclasses
import functools
import json
import pathlib
import shutil
import tempfile
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from openpi_accel import tree
from openpi_accel.build.training import build_training
from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig, WeightLoaderConfig
from openpi_accel.errors import UserError
from openpi_accel.models.pure import init_params
from openpi_accel.models.weights import load_base_params
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.parallel.sharding import state_shardings
from openpi_accel.train.checkpoint import CheckpointStore, Position
from openpi_accel.types import TrainState

_PROG = "python scripts/bench_checkpoint.py"


def main(argv: Sequence[str]) -> int:
    """The script, `bench_checkpoint.py CONFIG [--folder DIR] [--whole] [--saves N] [train options]`: prints JSON.

    Fresh parameters alone, without optimizer state and average, are written as training writes them, N times (twice
    unless told), read as base weights are read, and compared. A whole checkpoint is up to four times as large: --whole
    writes the state that the config trains with. 1 where what was read differs.

    Raises:
        UserError: the folder cannot be written to, or N is not positive.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--saves", type=int, default=2)
    own, rest = parser.parse_known_args(argv)
    config = parse_train_config(rest, prog=_PROG, description=f"{main.__doc__}")
    if own.saves < 1:
        raise UserError(f"--saves {own.saves}: give how often to write, at least once.")
    base = own.folder or pathlib.Path(config.checkpoint_base_dir)
    try:
        base.mkdir(parents=True, exist_ok=True)
        folder = pathlib.Path(tempfile.mkdtemp(prefix=".bench_checkpoint.", dir=base))
    except OSError as error:
        raise UserError(f"{base} cannot be written to ({error}). Give another --folder.") from error
    try:
        report = _measure(_state(config, own.whole), own.saves, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report))
    return 0 if report["equal"] else 1


def _state(config: TrainConfig, whole: bool) -> TrainState:
    """Fresh and placed as in training; without --whole the parameters alone."""
    mesh = make_mesh(config.fsdp_devices)
    if whole:
        fresh = dataclasses.replace(config, weight_loader=WeightLoaderConfig())
        return jax.block_until_ready(build_training(fresh, Acceleration(), mesh).fresh_state()[0])
    key, init = jax.random.key(0), functools.partial(init_params, config.model.architecture)
    shardings = state_shardings(jax.eval_shape(init, key), mesh)
    params = jax.block_until_ready(jax.jit(init, out_shardings=shardings)(key))
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=(), ema_params=None)


def _measure(state: TrainState, num_saves: int, folder: pathlib.Path) -> dict[str, object]:
    store = CheckpointStore(folder, max_to_keep=1)
    saves = []
    # New arrays for every save, as a step makes them: JAX keeps what an array once sent to the host.
    renewed = jax.jit(lambda state: jax.tree.map(jnp.copy, state), donate_argnums=0)
    try:
        for index in range(num_saves):
            state = jax.block_until_ready(renewed(state))
            start = time.perf_counter()
            store.save(index, state, Position(next_sample=0))
            blocked_s = time.perf_counter() - start
            store.wait()
            saves.append({"blocked_s": blocked_s, "save_s": time.perf_counter() - start})
    finally:
        store.close()
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    written = state.params if state.ema_params is None else state.ema_params
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), written)
    start = time.perf_counter()
    loaded, _ = load_base_params(str(folder / str(num_saves - 1) / "params"), abstract, lambda path: False)
    jax.block_until_ready(loaded)
    load_s = time.perf_counter() - start
    expected, read = tree.flatten(written), tree.flatten(loaded)
    return {
        "num_params": sum(leaf.size for leaf in expected.values()),
        "bytes_on_disk": on_disk,
        "saves": saves,  # training stands still for blocked_s
        "load_s": load_s,
        "equal": bool(jax.jit(_equal)(expected, read)),
        "devices": jax.device_count(),
        "device": jax.devices()[0].device_kind,
    }


def _equal(expected: dict[str, jax.Array], read: dict[str, jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.array_equal(expected[path], read[path]) for path in expected]))
