"""TrainConfig -> the opened, checked data of a run."""

import dataclasses
import functools
import pathlib
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from openpi_accel.build.files import FileOptions, require_files
from openpi_accel.build.reading import ReadingBar
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig
from openpi_accel.data.lerobot.baseline import BaselineReader
from openpi_accel.data.lerobot.dataset import LeRobotDataset
from openpi_accel.data.lerobot.frames import FrameError
from openpi_accel.data.lerobot.locate import find_dataset
from openpi_accel.data.lerobot.machine_cache import MachineCache, open_shared
from openpi_accel.data.loader import BadSample, Loader
from openpi_accel.data.mapping import DataMapping, resolve_mapping
from openpi_accel.data.norm_stats import NormStats, load_norm_stats, norm_stats_path
from openpi_accel.data.order import Order, SampleOrder
from openpi_accel.data.packed import PackedFrames
from openpi_accel.data.pipeline import BatchSource, settle_max_token_len
from openpi_accel.data.rows import hold_out, name_rows, training_rows
from openpi_accel.data.stats_command import stats_command
from openpi_accel.data.tokenizer import PromptTokenizer, find_tokenizer
from openpi_accel.data.validation import DataReport, validate_before_training, without_bad_rows
from openpi_accel.data.worker_pool import ProcessPool, ThreadPool
from openpi_accel.errors import UserError
from openpi_accel.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a run, checked.

    Attributes:
        config: the run's config with everything that the data decides filled in.
        source: makes batches of dataset rows.
        rows: the rows that training draws from.
        val_rows: the rows of held-out episodes.
        report: what the check before training found.
        norm_stats_text: the statistics file, to be stored with the checkpoints.
        worker_processes: workers are processes of their own.
    """

    config: TrainConfig
    source: BatchSource
    rows: np.ndarray
    val_rows: np.ndarray
    report: DataReport
    norm_stats_text: str
    worker_processes: bool = False

    @property
    def datasets(self) -> tuple["Data", ...]:
        """Each dataset of the run by itself."""
        return (self,)

    def loader(self, *, start_sample: int = 0, skipped: Mapping[int, str] | None = None) -> Loader[Batch]:
        """This process's share of the batches, from a position on, without the samples that were skipped before."""
        return make_loader(
            self.config,
            RowBatches(self.source, self.rows),
            SampleOrder(len(self.rows), self.config.seed),
            **worker_options(self.config, self.worker_processes),
            start_sample=start_sample,
            describe=self.describe,
            skipped=skipped,
        )

    def first_batches(self) -> tuple[Batch, ...]:
        """One sample of the order's first batch, for its shapes; what cannot be read shows here, before training."""
        with make_loader(
            dataclasses.replace(self.config, batch_size=jax.process_count(), num_microbatches=1),
            RowBatches(self.source, self.rows),
            SampleOrder(len(self.rows), self.config.seed),
            num_workers=0,
            describe=self.describe,
        ) as loader:
            return (next(loader).batch,)

    def validation_batches(self) -> Iterator[Batch]:
        """This process's share of each held-out batch: the same samples every time, drawn evenly by the seed.

        The last batch is filled up with samples that were there before.
        """
        size = self.config.batch_size
        rows = np.resize(self.val_rows, max(len(self.val_rows), size))
        with make_loader(
            self.config,
            RowBatches(self.source, rows),
            SampleOrder(len(rows), self.config.seed),
            num_workers=max(1, self.config.num_workers),
            prefetch_batches=1,
            describe=lambda ids: name_rows(self.source.dataset, rows[ids]),
        ) as loader:
            for _ in range(min(self.config.val_batches, -(-len(rows) // size))):
                yield next(loader).batch

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Sample ids, as the loader gives them, to dataset rows: (n,)."""
        return self.rows[ids]

    def camera_name(self, slot: str) -> str:
        """For people: which camera feeds a slot."""
        return f"{slot} <- {self.config.data.cameras.as_dict().get(slot, 'nothing (masked)')}"

    def captions(self, ids: np.ndarray, skipped: Mapping[int, str]) -> list[str]:
        """For people: dataset row, episode, frame and task of each sample, by position among the rows in use."""
        dataset, rows = self.source.dataset, self.rows[ids]
        return [
            "in place of a damaged sample"
            if int(sample) in skipped
            else f"row {row}: {name_rows(dataset, rows[i : i + 1])}\n{prompt}"
            for i, (sample, row, prompt) in enumerate(zip(ids, rows, self.source.prompts(rows), strict=True))
        ]

    def describe(self, ids: np.ndarray) -> str:
        """Names these samples to a person."""
        return f"{self.source.dataset.root}, {name_rows(self.source.dataset, self.rows[ids])}"


def make_loader(
    config: TrainConfig,
    load_batch: Callable[[np.ndarray], Batch],
    order: Order,
    **options: Any,
) -> Loader[Batch]:
    """The loader of this process; `options` are further arguments of `Loader`."""
    return Loader(
        load_batch,
        order,
        config.batch_size,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        skip_bad=config.data.on_corrupt == "skip",
        **options,
    )


def worker_options(config: TrainConfig, processes: bool) -> dict[str, Any]:
    """The workers of training, for `make_loader`."""
    return {
        "num_workers": config.num_workers,
        "prefetch_batches": config.data.prefetch_batches,
        "start_pool": ProcessPool if processes else ThreadPool,
    }


@dataclasses.dataclass(frozen=True)
class RowBatches:
    """Batches by position among the rows that training draws from; travels to worker processes.

    Attributes:
        source: makes batches of dataset rows.
        rows: those rows.
    """

    source: BatchSource
    rows: np.ndarray

    def __call__(self, ids: np.ndarray) -> Batch:
        """The batch of these positions.

        Raises:
            BadSample: a frame cannot be read.
        """
        rows = self.rows[ids]
        try:
            return self.source.load_batch(rows)
        except FrameError as error:
            raise BadSample(int(ids[np.flatnonzero(rows == error.row)[0]]), str(error)) from error


def _columns(mapping: DataMapping) -> tuple[str, ...]:
    """The columns that batches and the check before training read."""
    return mapping.state_key, mapping.action_key, "task_index"


def _open(
    config: TrainConfig, environment: Environment
) -> tuple[LeRobotDataset, DataMapping, Callable[..., PromptTokenizer]]:
    """The dataset, what of it feeds the model, and what makes a tokenizer of a given length."""
    if config.data.mixture is not None:
        raise UserError(
            f"One dataset at a time here, and {config.data.mixture} names several: give --data.path of one instead of "
            "--data.mixture."
        )
    root = find_dataset(config.data.repo_id, config.data.path, environment)
    # The index is asked for only where there are several: the question alone takes the GPU, which tools leave alone.
    with ReadingBar(quiet=jax.distributed.is_initialized() and jax.process_index() != 0) as bar:
        dataset = open_shared(
            root,
            lambda opened: _columns(resolve_mapping(config.data, opened)),
            MachineCache(folder=environment.openpi_cache_home / "columns"),
            config.data.video_decoder,
            track=bar.track,
            say=bar.say,
        )
    tokenizer = functools.partial(
        PromptTokenizer,
        find_tokenizer(config.data.tokenizer_path, environment),
        vocab_size=config.model.vocab_size,
        allow_truncation=config.data.allow_truncation,
    )
    return dataset, resolve_mapping(config.data, dataset), tokenizer


def prompt_tokens(config: TrainConfig, environment: Environment) -> int:
    """The prompt length of a batch (`settle_max_token_len`).

    Raises:
        UserError: as `build_source`, but for the statistics.
    """
    dataset, mapping, tokenizer = _open(config, environment)
    return settle_max_token_len(dataset, mapping, tokenizer(max_token_len=None), config.model, config.data)


def build_source(
    config: TrainConfig,
    acceleration: Acceleration,
    environment: Environment,
    *,
    norm_stats_file: pathlib.Path | None = None,
    norm_stats: Callable[[int, int], NormStats] | None = None,
    options: FileOptions | None = None,
) -> tuple[TrainConfig, BatchSource]:
    """Opens the dataset and what belongs to it, and settles what the data decides (mapping, prompt length).

    Args:
        config: the run's config.
        acceleration: which cameras are left out and decoded.
        environment: where files are looked for.
        norm_stats_file: None is the assets folder's.
        norm_stats: (state dimensions, action dimensions) -> the statistics, instead of a file's.
        options: where the tool's user says where files are, for messages; None is training's.

    Raises:
        UserError: something is missing or does not fit; says what to do.
    """
    if config.data.mixture is None:
        require_files(
            config, environment, options=options, norm_stats_file=norm_stats_file, statistics=norm_stats is None
        )
    dataset, mapping, tokenizer = _open(config, environment)
    if norm_stats is not None:
        stats = norm_stats(mapping.state_dim, mapping.action_dim)
    else:
        path = norm_stats_file or norm_stats_path(config.assets_base_dir, config.name, config.asset_id)
        stats = load_norm_stats(path, command=stats_command(config, str(dataset.root)))
    max_token_len = settle_max_token_len(dataset, mapping, tokenizer(max_token_len=None), config.model, config.data)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_token_len=max_token_len),
        data=dataclasses.replace(
            config.data,
            asset_id=config.asset_id,
            cameras=mapping.cameras,
            state_key=mapping.state_key,
            action_key=mapping.action_key,
        ),
    )
    source = BatchSource(
        dataset=dataset,
        mapping=mapping,
        norm_stats=stats,
        tokenizer=tokenizer(max_token_len=max_token_len),
        model=config.model,
        data=config.data,
        skip_images=acceleration.skip_images,
        only_consumed=acceleration.skip_video_decode,
        packed=_open_packed(config, dataset),
        baseline=BaselineReader(dataset, mapping.state_key, mapping.action_key, config.model.action_horizon)
        if config.data.reader == "lerobot"
        else None,
        loss=config.loss,
    )
    return config, source


def pack_command(config: TrainConfig, dataset_path: str) -> str:
    """The command that packs this run's cameras."""
    cameras = " ".join(
        f"--data.cameras.{slot.replace('_', '-')}={shlex.quote(key)}"
        for slot, key in config.data.cameras.as_dict().items()
    )
    paths = f"--data.path={shlex.quote(dataset_path)} --data.packed={shlex.quote(config.data.packed or 'FOLDER')}"
    return f"python scripts/pack_dataset.py {config.name} {paths} {cameras}"


def _open_packed(config: TrainConfig, dataset: LeRobotDataset) -> PackedFrames | None:
    if config.data.packed is None:
        return None
    folder = pathlib.Path(config.data.packed).expanduser().absolute()
    cameras = list(config.data.cameras.as_dict().values())
    return PackedFrames(folder, dataset, cameras, pack_command(config, str(dataset.root)))


def build_data(config: TrainConfig, acceleration: Acceleration, environment: Environment) -> Data:
    """The data of a training run, with every number and every prompt checked.

    Raises:
        UserError: as `build_source` and `validate_before_training`.
    """
    config, source = build_source(config, acceleration, environment)
    rows = training_rows(source.dataset, config.data.episodes, config.data.keep_frames)
    left_out: list[str] = []
    if config.data.on_corrupt == "skip":
        rows, left_out = without_bad_rows(source, rows)
    train_rows, val_rows = hold_out(source.dataset, rows, config.data.val_fraction, config.seed)
    report = validate_before_training(
        source, rows, command=stats_command(config, str(source.dataset.root)), left_out=left_out
    )
    path = norm_stats_path(config.assets_base_dir, config.name, config.asset_id)
    return Data(
        config=config,
        source=source,
        rows=train_rows,
        val_rows=val_rows,
        report=report,
        norm_stats_text=path.read_text(),
        # lerobot's reader holds Python's lock; upstream runs it in processes.
        worker_processes=acceleration.worker_cpu or config.data.reader == "lerobot",
    )
