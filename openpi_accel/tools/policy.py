"""A trained policy from a checkpoint, with the data it is to be tried on.

Letters: N frames, B frames at once, A action horizon, E action dimension, D unpadded action dimensions.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from openpi_accel.build.data import build_source
from openpi_accel.build.files import FileOptions
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig
from openpi_accel.config.serialize import CONFIG_FILE, from_json
from openpi_accel.data.augment import to_float
from openpi_accel.data.norm_stats import FILE_NAME
from openpi_accel.data.pipeline import BatchSource
from openpi_accel.errors import UserError
from openpi_accel.models.pure import bind, init_params
from openpi_accel.models.weights import load_base_params
from openpi_accel.objective import draw_noise_time
from openpi_accel.train.run_folder import committed_steps
from openpi_accel.types import Batch, Observation, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where things lie.

    Attributes:
        folder: the step's folder, with params/ and assets/.
        config: what it was trained with, or None where its run folder has no config.json (upstream's).
    """

    folder: pathlib.Path
    config: TrainConfig | None

    def norm_stats_file(self, asset_id: str) -> pathlib.Path:
        """The statistics stored with the weights.

        Raises:
            UserError: there are none, or several and none of this asset id.
        """
        exact = self.folder / "assets" / asset_id / FILE_NAME
        if exact.is_file():
            return exact
        found = sorted((self.folder / "assets").rglob(FILE_NAME))
        if len(found) != 1:
            listed = ", ".join(str(path.parent.relative_to(self.folder / "assets")) for path in found) or "none"
            raise UserError(
                f"{exact} is missing; asset ids in this checkpoint: {listed}. Name one of them with --asset-id."
            )
        return found[0]


def find_checkpoint(path: str | pathlib.Path) -> Checkpoint:
    """A run folder (its newest checkpoint) or the folder of one step.

    Raises:
        UserError: no complete checkpoint there.
    """
    given = pathlib.Path(path).expanduser()
    steps = committed_steps(given)
    folder = given / str(steps[-1]) if steps else given
    if not (folder / "params").is_dir():
        raise UserError(
            f"{given} holds no complete checkpoint. Give a run folder (<checkpoint-base-dir>/<config>/<exp-name>) or "
            "the folder of one step in it."
        )
    config_file = folder.resolve().parent / CONFIG_FILE
    config = from_json(config_file.read_text(), str(config_file)) if config_file.is_file() else None
    return Checkpoint(folder=folder, config=config)


class Policy:
    """A model with its weights and the source that feeds it.

    Attributes:
        config: what it was trained with.
        source: makes its batches.
    """

    def __init__(self, config: TrainConfig, source: BatchSource, params: Params, *, batch_size: int) -> None:
        """Compiles nothing yet. Rows are taken `batch_size` at a time."""
        self.config, self.source = config, source
        self._params, self._batch_size = params, batch_size
        self._model_of = bind(config.model.architecture)
        self._sample = jax.jit(self._sample_batch, static_argnums=4)
        self._loss = jax.jit(self._loss_batch, static_argnums=4)

    def predict(self, rows: np.ndarray, *, seed: int = 0, num_steps: int = 10) -> np.ndarray:
        """Samples an action chunk for each row.

        The noise of a row depends on (seed, row) alone, so it does not matter which rows are asked for together.

        Returns:
            N A D float64, absolute, in the dataset's units.
        """
        return self.source.restore_actions(self._over_rows(self._sample, rows, seed, num_steps), rows)

    def loss(self, rows: np.ndarray, *, seed: int = 0, draws: int = 1) -> np.ndarray:
        """Flow-matching loss without augmentation, over the real action dimensions alone (padding is learned blind).

        Noise and time depend on (seed, row) alone, so the losses of two models compare.

        Args:
            rows: N dataset rows.
            seed: of noise and time.
            draws: pairs of noise and time per row.

        Returns:
            N D, averaged over the chunk and the draws.
        """
        return self._over_rows(self._loss, rows, seed, draws)[:, : self.source.mapping.action_dim]

    def _sample_batch(self, params: Params, batch: Batch, rows: jax.Array, seed: int, num_steps: int) -> jax.Array:
        noise = jax.vmap(lambda key: jax.random.normal(key, batch.actions.shape[1:]))(_keys(seed, rows))
        return self._model_of(params).sample_actions(_without_augmentation(batch), noise, num_steps)

    def _loss_batch(self, params: Params, batch: Batch, rows: jax.Array, seed: int, draws: int) -> jax.Array:
        horizon, width = batch.actions.shape[1:]
        model, obs = self._model_of(params), _without_augmentation(batch)

        def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            noise_key, time_key = jax.random.split(key)
            noise, time = draw_noise_time(noise_key, time_key, (1, horizon, width))
            return noise[0], time[0]

        def one(number: jax.Array) -> jax.Array:
            keys = jax.vmap(jax.random.fold_in, (0, None))(_keys(seed, rows), number)
            noise, time = jax.vmap(draw)(keys)
            t = time[:, None, None]
            velocity = model.velocity(obs, t * noise + (1 - t) * batch.actions, time)
            return jnp.mean(jnp.square(velocity - (noise - batch.actions)), axis=1)

        return jnp.mean(jax.lax.map(one, jnp.arange(draws)), axis=0)

    def _over_rows(self, fn: Callable[..., jax.Array], rows: np.ndarray, seed: int, number: int) -> np.ndarray:
        """fn over all rows, in batches of one size (the last is filled up), so that it compiles once."""
        parts = []
        for start in range(0, len(rows), self._batch_size):
            part = rows[start : start + self._batch_size]
            filled = np.concatenate([part, np.full(self._batch_size - len(part), part[-1])])
            batch = self.source.load_batch(filled)
            parts.append(np.asarray(fn(self._params, batch, jnp.asarray(filled), seed, number))[: len(part)])
        return np.concatenate(parts)


def _keys(seed: int, rows: jax.Array) -> jax.Array:
    """One key for each row."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows)


def _without_augmentation(batch: Batch) -> Observation:
    return dataclasses.replace(batch.observation, images=to_float(batch.observation.images))


def load_policy(
    checkpoint: Checkpoint,
    config: TrainConfig,
    environment: Environment,
    *,
    batch_size: int,
    asset_id: str | None = None,
    options: FileOptions | None = None,
) -> Policy:
    """Reads weights and statistics, and opens the dataset that `config` names.

    Cameras that feed no slot are left out: their tokens are masked anyway. A packed cache is not used: it may be of
    another dataset.

    Raises:
        UserError: as `build_source`; or the weights are of another model.
    """
    file = checkpoint.norm_stats_file(asset_id or config.asset_id)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, packed=None))
    acceleration = Acceleration(skip_images=("auto",), skip_video_decode=True)
    config, source = build_source(config, acceleration, environment, norm_stats_file=file, options=options)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(lambda: init_params(config.model.architecture, jax.random.key(0)))
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), shapes)
    params, _ = load_base_params(checkpoint.folder / "params", target, lambda path: False)
    return Policy(config, source, params, batch_size=batch_size)
