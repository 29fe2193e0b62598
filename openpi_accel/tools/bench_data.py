"""Times the data plane: every decoder, reader and kind of worker on the same files in one run."""

import argparse
import dataclasses
import io
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import PIL.Image
from rich.console import Console
from rich.table import Table

from openpi_accel.build.data import RowBatches, build_source
from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig
from openpi_accel.data.images import decode_image
from openpi_accel.data.lerobot.dataset import LeRobotDataset
from openpi_accel.data.loader import Loader
from openpi_accel.data.norm_stats import NormStats, Statistics
from openpi_accel.data.order import SampleOrder
from openpi_accel.data.pipeline import BatchSource
from openpi_accel.data.rows import training_rows
from openpi_accel.data.transforms import to_model_image
from openpi_accel.data.worker_pool import LoadBatch, ProcessPool, ThreadPool, WorkerPool
from openpi_accel.errors import UserError
from openpi_accel.sizes import format_bytes
from openpi_accel.types import Batch

_LEROBOT = "lerobot"
_PROG = "python scripts/bench_data.py"
_POOLS: dict[str, Callable[[LoadBatch[Batch], int], WorkerPool[Batch]]] = {
    "threads": ThreadPool,
    "processes": ProcessPool,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One line.

    Attributes:
        what: decode (one frame), batch (samples, in this thread), or load (samples, by workers).
        reader: files, packed or lerobot; for decode the decoder.
        workers: kind and number; empty for none.
        per_s: frames or samples per second of wall time.
        per_core_s: frames or samples per second of CPU time; None where other processes did the work.
    """

    what: str
    reader: str
    workers: str
    per_s: float
    per_core_s: float | None


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """The script: `bench_data.py CONFIG [train options] [--readers …] [--workers 1,2,8] [--batches N] [--json]`.

    Raises:
        UserError: no dataset, no tokenizer, no lerobot that reads it, or a pack that is not the dataset's.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--workers", default="1,2,8")
    parser.add_argument("--readers", default="native")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(argv)
    description = (
        f"{__doc__} Takes the options of scripts/train.py; with --data.packed the packed cache is timed too. Further: "
        "--readers native,lerobot (lerobot's own, by processes alone), --workers 1,2,8, --batches N (per line), --json "
        "(one line of JSON per measurement)."
    )
    config = parse_train_config(rest, prog=_PROG, description=description)
    try:
        numbers = [int(number) for number in own.workers.split(",") if number]
    except ValueError as error:
        raise UserError(
            f"--workers {own.workers!r} is no list of numbers; write for example --workers 1,2,8."
        ) from error
    readers = own.readers.split(",")
    for reader in readers:
        if reader not in ("native", "lerobot"):
            raise UserError(f"--readers {own.readers}: there is no reader {reader!r}; take native, lerobot or both.")
    console = Console()
    table = Table("what", "reader", "workers", "per second", "per second and core")
    for line in measure(config, env, numbers, max(1, own.batches), with_lerobot="lerobot" in readers):
        if own.json:
            print(json.dumps(dataclasses.asdict(line)), flush=True)
        core = "" if line.per_core_s is None else f"{line.per_core_s:.0f}"
        table.add_row(line.what, line.reader, line.workers, f"{line.per_s:.0f}", core)
    if not own.json:
        console.print(table)
        peak = format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10)
        console.print(f"batches of {config.batch_size}; peak memory of this process {peak}", highlight=False)
    return 0


def measure(
    config: TrainConfig,
    env: Mapping[str, str],
    workers: Sequence[int],
    batches: int,
    *,
    with_lerobot: bool = False,
) -> Iterator[Measured]:
    """Yields every measurement, as soon as it is done. The native reader is always measured."""
    acceleration = dataclasses.replace(Acceleration.from_env(env), skip_images=("auto",), skip_video_decode=True)
    environment = Environment.from_env(env)
    plain = dataclasses.replace(config, data=dataclasses.replace(config.data, packed=None))
    configs = [("files", plain), *([("packed", config)] if config.data.packed else [])]
    if with_lerobot:
        configs.append((_LEROBOT, dataclasses.replace(plain, data=dataclasses.replace(plain.data, reader="lerobot"))))
    sources = {
        name: build_source(chosen, acceleration, environment, norm_stats=_unit_stats)[1] for name, chosen in configs
    }
    dataset = sources["files"].dataset
    rows = training_rows(dataset, config.data.episodes, config.data.keep_frames)
    size = min(config.batch_size, len(rows))
    chosen_rows = np.random.default_rng(0).permutation(rows)[: 4 * size]
    for camera in sources["files"].mapping.cameras.as_dict().values():
        yield from _decoders(dataset, camera, chosen_rows[:64])
    for name, source in sources.items():
        yield _batches(name, source, chosen_rows, size, batches)
    for kind, pool in _POOLS.items():
        for number in workers:
            for name, source in sources.items():
                if name == _LEROBOT and pool is ThreadPool:
                    continue  # it reads one row at a time
                yield _load(name, source, rows, size, batches, f"{number} {kind}", number, pool)


def _unit_stats(state_dim: int, action_dim: int) -> NormStats:
    """What the numbers are does not change how long they take."""
    state, actions = (
        Statistics(mean=np.zeros(d), std=np.ones(d), q01=-np.ones(d), q99=np.ones(d)) for d in (state_dim, action_dim)
    )
    return NormStats(state=state, actions=actions)


def _timed(run: Callable[[int], object], count: int, repeats: int = 3) -> tuple[float, float]:
    """Calls per second of wall and of CPU time: the median over repeats, after one call to warm up."""
    run(0)
    wall, core = [], []
    for _ in range(repeats):
        start, start_core = time.perf_counter(), time.process_time()
        for i in range(count):
            run(i)
        core.append(count / (time.process_time() - start_core))
        wall.append(count / (time.perf_counter() - start))
    return statistics.median(wall), statistics.median(core)


def _decoders(dataset: LeRobotDataset, camera: str, rows: np.ndarray) -> Iterator[Measured]:
    def line(name: str, run: Callable[[int], object], count: int, scale: int = 1) -> Measured:
        wall, core = _timed(run, count)
        return Measured(what=f"decode {camera}", reader=name, workers="", per_s=wall * scale, per_core_s=core * scale)

    if dataset.cameras[camera].kind == "video":
        yield line("PyAV, random order", lambda i: dataset.frames(camera, rows[i : i + 1]), len(rows))
        yield line("PyAV, as one batch", lambda i: dataset.frames(camera, rows), 1, len(rows))
    else:
        images = [dataset.image_bytes(camera, int(row)) for row in rows]
        yield line("imagecodecs", lambda i: decode_image(images[i]), len(rows))
        yield line("Pillow", lambda i: np.asarray(PIL.Image.open(io.BytesIO(images[i])).convert("RGB")), len(rows))
        yield line("parquet page", lambda i: dataset.image_bytes(camera, int(rows[i])), len(rows))
    frames = dataset.frames(camera, rows)
    yield line("resize", lambda i: to_model_image(frames[i]), len(rows))


def _batches(name: str, source: BatchSource, rows: np.ndarray, size: int, count: int) -> Measured:
    parts = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
    wall, core = _timed(lambda i: source.load_batch(parts[i % len(parts)]), count)
    return Measured(what="batch", reader=name, workers="", per_s=wall * size, per_core_s=core * size)


def _load(
    name: str,
    source: BatchSource,
    rows: np.ndarray,
    size: int,
    count: int,
    label: str,
    number: int,
    pool: Callable[[LoadBatch[Batch], int], WorkerPool[Batch]],
) -> Measured:
    load = RowBatches(source, rows)
    with Loader(load, SampleOrder(len(rows), 0), size, num_workers=number, start_pool=pool) as loader:
        for _ in range(number + 1):  # until every worker has started and read its files' indices
            next(loader)
        start, start_core = time.perf_counter(), time.process_time()
        for _ in range(max(count, 3 * number)):
            next(loader)
        wall, core = time.perf_counter() - start, time.process_time() - start_core
    done = max(count, 3 * number) * size
    per_core_s = done / core if pool is ThreadPool else None
    return Measured(what="load", reader=name, workers=label, per_s=done / wall, per_core_s=per_core_s)
