"""TrainConfig with --data.mixture -> the opened, checked data of a run on several datasets."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from openpi_accel.build.data import Data, RowBatches, build_data, make_loader, prompt_tokens, worker_options
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig
from openpi_accel.data.loader import BadSample, Loader
from openpi_accel.data.mixture_file import MixturePart, read_mixture
from openpi_accel.data.mixture_order import MixtureOrder
from openpi_accel.errors import UserError
from openpi_accel.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """The data of a run on several datasets, checked. Used as `Data` is.

    A sample's id numbers the rows of all parts through, part after part.

    Attributes:
        config: the run's config, with the prompt length of all parts.
        datasets: the parts' data.
        names, weights: the parts'.
        worker_processes: workers are processes of their own.
    """

    config: TrainConfig
    datasets: tuple[Data, ...]
    names: tuple[str, ...]
    weights: tuple[Fraction, ...]
    worker_processes: bool = False

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The first id of each part, and after them the number of ids."""
        return np.concatenate([[0], np.cumsum([len(part.rows) for part in self.datasets])])

    def order(self) -> MixtureOrder:
        """Which sample comes when; whole batches have the same cameras."""
        return MixtureOrder(
            [len(part.rows) for part in self.datasets],
            self.weights,
            [part.source.slots for part in self.datasets],
            batch_size=self.config.batch_size,
            seed=self.config.seed,
        )

    def loader(self, *, start_sample: int = 0, skipped: Mapping[int, str] | None = None) -> Loader[Batch]:
        """As `Data.loader`."""
        batches = tuple(RowBatches(part.source, part.rows) for part in self.datasets)
        return make_loader(
            self.config,
            MixedBatches(batches, self.starts),
            self.order(),
            **worker_options(self.config, self.worker_processes),
            start_sample=start_sample,
            describe=self.describe,
            skipped=skipped,
        )

    def first_batches(self) -> tuple[Batch, ...]:
        """A sample for each set of cameras. Of every part one is read, so that what is wrong shows before training."""
        found = {part.source.slots: part.first_batches()[0] for part in self.datasets}
        return tuple(found.values())

    def validation_batches(self) -> Iterator[Batch]:
        """The held-out batches of one part after the other, at most `val_batches` of each."""
        for part in self.datasets:
            if len(part.val_rows):
                yield from part.validation_batches()

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Sample ids to (part, dataset row) pairs: (n, 2)."""
        parts = self._part_of(ids)
        rows = [self.datasets[part].rows[id - self.starts[part]] for part, id in zip(parts, ids, strict=True)]
        return np.stack([parts, np.array(rows, np.int64)], axis=1)

    def camera_name(self, slot: str) -> str:
        """As `Data.camera_name`, without the camera, which may be another one in every part."""
        return slot

    def captions(self, ids: np.ndarray, skipped: Mapping[int, str]) -> list[str]:
        """As `Data.captions`, below the part's name."""
        captions = []
        for part, sample in zip(self._part_of(ids), ids, strict=True):
            of_part = {} if int(sample) not in skipped else {int(sample - self.starts[part]): skipped[int(sample)]}
            caption = self.datasets[part].captions(np.array([sample - self.starts[part]]), of_part)[0]
            captions.append(f"{self.names[part]}, {caption}")
        return captions

    def describe(self, ids: np.ndarray) -> str:
        """Names these samples to a person."""
        parts = self._part_of(ids)
        return "; ".join(
            f"{self.names[part]}: {self.datasets[part].describe(ids[parts == part] - self.starts[part])}"
            for part in np.unique(parts).tolist()
        )

    def shares(self) -> list[str]:
        """What each part contributes, a line each, and how often its frames are seen."""
        total, lines = sum(self.weights), []
        for name, weight, part in zip(self.names, self.weights, self.datasets, strict=True):
            share = float(weight / total)
            passes = share * int(self.starts[-1]) / len(part.rows)
            cameras = ", ".join(part.source.slots)
            lines.append(
                f"{name}: {100 * share:.4g} % of the samples; its {len(part.rows)} frames are seen {passes:.3g} times "
                f"in {self.starts[-1]} samples; batches with {cameras}"
            )
        return lines

    def meaning(self) -> dict[str, Any]:
        """What fixes the order beside the parts' data and the seed: equal on resume and in every process."""
        groups = len({part.source.slots for part in self.datasets})
        return {
            "shares": {
                name: str(weight / sum(self.weights)) for name, weight in zip(self.names, self.weights, strict=True)
            },
            "order": list(self.names),
            # The order depends on the batch size where batches are grouped by their cameras.
            "batch_size": self.config.batch_size if groups > 1 else None,
        }

    def _part_of(self, ids: np.ndarray) -> np.ndarray:
        return part_of(self.starts, ids)


def part_of(starts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The part of each sample id: (n,). `starts` as in `MixedBatches`."""
    return np.searchsorted(starts, ids, side="right") - 1


@dataclasses.dataclass(frozen=True)
class MixedBatches:
    """Batches by sample id; all samples of one have the same cameras. Travels to worker processes.

    Attributes:
        parts: make each part's samples.
        starts: the first id of each part, and after them the number of ids.
    """

    parts: tuple[RowBatches, ...]
    starts: np.ndarray

    def __call__(self, ids: np.ndarray) -> Batch:
        """The batch of these samples, in their order.

        Raises:
            BadSample: a frame cannot be read.
        """
        parts = part_of(self.starts, ids)
        places, batches = [], []
        for part in np.unique(parts).tolist():
            start, mine = int(self.starts[part]), np.flatnonzero(parts == part)
            try:
                batches.append(self.parts[part](ids[mine] - start))
            except BadSample as error:
                raise BadSample(start + error.row, str(error)) from error
            places.append(mine)
        if len(batches) == 1:
            return batches[0]

        def merge(*leaves: np.ndarray) -> np.ndarray:
            whole = np.empty((len(ids), *leaves[0].shape[1:]), leaves[0].dtype)
            for place, leaf in zip(places, leaves, strict=True):
                whole[place] = leaf
            return whole

        merged: Batch = jax.tree.map(merge, *batches)
        return merged


def build_mixture(config: TrainConfig, acceleration: Acceleration, environment: Environment) -> Mixture:
    """The data of every part, with every number and every prompt checked.

    Raises:
        UserError: the file or a part is wrong; names the part. An option named in a part's message is a field of the
            file: --data.state-key is state_key.
    """
    assert config.data.mixture is not None
    parts = read_mixture(config.data.mixture, config.data)
    lengths = [_within(config, part, lambda of_part: prompt_tokens(of_part, environment)) for part in parts]
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, max_token_len=max(lengths)))
    datasets = tuple(
        _within(config, part, lambda of_part: build_data(of_part, acceleration, environment)) for part in parts
    )
    _refuse_shared_statistics(parts, datasets)
    mixture = Mixture(
        config=config,
        datasets=datasets,
        names=tuple(part.name for part in parts),
        weights=tuple(part.weight for part in parts),
        worker_processes=any(data.worker_processes for data in datasets),
    )
    try:
        mixture.order()
    except UserError as error:
        raise UserError(f"{config.data.mixture}: {error}") from error
    return mixture


def _within[T](config: TrainConfig, part: MixturePart, run: Callable[[TrainConfig], T]) -> T:
    try:
        return run(dataclasses.replace(config, data=part.data))
    except UserError as error:
        raise UserError(f"{config.data.mixture}, part {part.name}: {error}") from error


def _refuse_shared_statistics(parts: tuple[MixturePart, ...], datasets: tuple[Data, ...]) -> None:
    """Two folders of the same name would share their statistics unasked."""
    roots: dict[str, pathlib.Path] = {}
    for part, data in zip(parts, datasets, strict=True):
        asset_id, root = data.config.asset_id, data.source.dataset.root.resolve()
        if roots.setdefault(asset_id, root) != root and part.data.asset_id is None:
            raise UserError(
                f"Part {part.name} would use the statistics {asset_id}, which belong to {roots[asset_id]}. "
                'Give the part an "asset_id" of its own.'
            )
