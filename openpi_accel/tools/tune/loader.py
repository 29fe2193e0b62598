"""How many samples per second the data come with, by number of workers and batches kept ready; no step runs."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from openpi_accel.build.data import RowBatches, build_source
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig
from openpi_accel.data.loader import Loader
from openpi_accel.data.norm_stats import NormStats, Statistics
from openpi_accel.data.order import SampleOrder
from openpi_accel.data.pipeline import BatchSource
from openpi_accel.data.rows import training_rows
from openpi_accel.data.stats_command import stats_command
from openpi_accel.data.validation import validate_before_training, without_bad_rows
from openpi_accel.data.worker_pool import ProcessPool

_MEASURED_S = 4.0
# What is gained by more workers must be worth their memory.
_WORTH = 1.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderRate:
    """One measurement."""

    num_workers: int
    prefetch_batches: int
    samples_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedData:
    """The data of a run, looked through as training would.

    Attributes:
        config: the run's, its prompt length settled.
        source: makes batches.
        rows: those that training draws from.
    """

    config: TrainConfig
    source: BatchSource
    rows: np.ndarray


def open_data(config: TrainConfig, env: Mapping[str, str]) -> OpenedData:
    """Opens them before anything is measured: what training would refuse (a prompt that is too long) is refused here.

    Args:
        config: of the run.
        env: tells where files are.

    Raises:
        UserError: no dataset, no tokenizer, or data that training would refuse. Statistics need not be there.
    """
    acceleration = Acceleration(skip_images=("auto",), skip_video_decode=True)
    config, source = build_source(config, acceleration, Environment.from_env(env), norm_stats=_unit_stats)
    rows = training_rows(source.dataset, config.data.episodes, config.data.keep_frames)
    if config.data.on_corrupt == "skip":
        rows, _ = without_bad_rows(source, rows)
    validate_before_training(source, rows, command=stats_command(config, str(source.dataset.root)))
    return OpenedData(config=config, source=source, rows=rows)


def measure(data: OpenedData, batch_size: int, num_cores: int, budget_s: float) -> list[LoaderRate]:
    """The rates of growing numbers of workers, then of more batches kept ready by the best of them.

    Args:
        data: what is loaded.
        batch_size: the one that was found.
        num_cores: that this process may use.
        budget_s: no further measurement is started after it.
    """
    ends_s = time.monotonic() + budget_s
    source, rows, prefetch_batches = data.source, data.rows, data.config.data.prefetch_batches
    size = min(batch_size, len(rows))

    def rate(num_workers: int, ahead: int) -> LoaderRate:
        order = SampleOrder(len(rows), 0)
        with Loader(
            RowBatches(source, rows),
            order,
            size,
            num_workers=num_workers,
            prefetch_batches=ahead,
            start_pool=ProcessPool,
        ) as loader:
            for _ in range(max(num_workers, ahead) + 1):  # until all have started, and nothing lies ready
                next(loader)
            started_s, count = time.perf_counter(), 0
            while count < 2 * num_workers or time.perf_counter() - started_s < _MEASURED_S:
                next(loader)
                count += 1
            per_s = count * size / (time.perf_counter() - started_s)
        return LoaderRate(num_workers=num_workers, prefetch_batches=ahead, samples_per_s=per_s)

    rates: list[LoaderRate] = []
    for num_workers in _numbers(num_cores):
        if rates and time.monotonic() > ends_s:
            break
        rates.append(rate(num_workers, prefetch_batches))
    best = choose(rates)
    if time.monotonic() < ends_s:
        rates.append(rate(best.num_workers, 2 * max(best.num_workers, prefetch_batches)))
    return rates


def choose(rates: Sequence[LoaderRate], enough: float = float("inf")) -> LoaderRate:
    """The cheapest that gives `enough` samples per second; else the fastest, a dearer one only where it is 5 % faster.

    Args:
        rates: from cheap to dear.
        enough: what the step takes, with something to spare.
    """
    best = rates[0]
    for one in rates[1:]:
        if best.samples_per_s >= enough:
            break
        if one.samples_per_s > best.samples_per_s * _WORTH:
            best = one
    return best


def _numbers(num_cores: int) -> Iterator[int]:
    number = 1
    while number <= max(1, num_cores):
        yield number
        number *= 2


def _unit_stats(state_dim: int, action_dim: int) -> NormStats:
    """What the numbers are does not change how long they take."""
    state, actions = (
        Statistics(mean=np.zeros(d), std=np.ones(d), q01=-np.ones(d), q99=np.ones(d)) for d in (state_dim, action_dim)
    )
    return NormStats(state=state, actions=actions)
