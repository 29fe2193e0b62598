"""A linear model, a loader and a run around them: everything that train/ asks for, without pi0.5."""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from openpi_accel.config.schema import OptimizerConfig, ScheduleConfig
from openpi_accel.data.loader import Loader
from openpi_accel.data.order import SampleOrder
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.train import loop, start
from openpi_accel.train.checkpoint import CheckpointStore
from openpi_accel.train.guard import Guard
from openpi_accel.train.metrics import MetricsWriter
from openpi_accel.train.optimizer import make_optimizer, make_schedule
from openpi_accel.train.run_folder import prepare_run_folder
from openpi_accel.train.step import make_train_step
from openpi_accel.types import Params, TrainState

BATCH, WIDTH = 8, 16


@dataclasses.dataclass(frozen=True)
class Loaded:
    batch: dict[str, np.ndarray]
    sample_ids: np.ndarray
    next_sample: int


def loaded_by_rows(next_sample: int, note: Callable[[int, np.ndarray], None]) -> Loader[dict[str, np.ndarray]]:
    """The project's own loader, over 20 rows in the order of a seed; sample i of `batches` is row i here.

    Args:
        note: told the first sample of every global batch and the rows of it that this process reads.
    """

    class Noting(SampleOrder):
        def rows(self, first: int, count: int, skipped: Collection[int] = ()) -> np.ndarray:
            found = super().rows(first, count, skipped)
            if count < BATCH or jax.process_count() == 1:  # else it names the whole batch
                note(first // BATCH * BATCH, found)
            return found

    def load(rows: np.ndarray) -> dict[str, np.ndarray]:
        x = np.stack([np.random.default_rng(i).standard_normal(WIDTH).astype(np.float32) for i in rows])
        return {"x": x, "y": 2 * x[:, :4] - 1}

    share = (jax.process_index(), jax.process_count())
    return Loader(load, Noting(20, 7), BATCH, *share, num_workers=2, start_sample=next_sample)


def batches(next_sample: int = 0, bad_sample: int | None = None) -> Iterator[Loaded]:
    """This process's share of each batch. Sample i is drawn from seed i; the target of `bad_sample` is NaN."""
    size = BATCH // jax.process_count()
    share = slice(jax.process_index() * size, (jax.process_index() + 1) * size)
    while True:
        ids = np.arange(next_sample, next_sample + BATCH)
        x = np.stack([np.random.default_rng(i).standard_normal(WIDTH).astype(np.float32) for i in ids])
        y = 2 * x[:, :4] - 1
        if bad_sample in ids:
            y[list(ids).index(bad_sample)] = np.nan
        next_sample += BATCH
        yield Loaded({"x": x[share], "y": y[share]}, ids, next_sample)


def init_params(rng: jax.Array) -> Params:
    return {"hidden": {"kernel": jax.random.normal(rng, (WIDTH, 64)) * 0.1}, "out": {"kernel": jnp.zeros((64, 4))}}


def loss_fn(params: Params, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
    noise = 0.01 * jax.random.normal(rng, batch["x"].shape)
    hidden = jnp.tanh((batch["x"] + noise) @ params["hidden"]["kernel"])
    return jnp.mean(jnp.square(hidden @ params["out"]["kernel"] - batch["y"]))


def everything(path: str) -> bool:
    return True


SCHEDULE = make_schedule(ScheduleConfig(warmup_steps=3, peak_lr=1e-2, decay_steps=100, decay_lr=1e-3))
TX = make_optimizer(OptimizerConfig(), SCHEDULE)


class WithoutCurve(MetricsWriter):
    """Draws no loss curve, which a run does after every save: Matplotlib would be most of a toy run's time."""

    def save_loss_curve(self, name: str = "loss_curve.png") -> None:
        pass


def train(
    folder: pathlib.Path,
    num_steps: int,
    *,
    resume: bool = False,
    mesh: Mesh | None = None,
    ema_decay: float | None = 0.9,
    log_interval: int = 1,
    save_interval: int = 1000,
    bad_sample: int | None = None,
    keep_period: int | None = None,
    loader: Any = None,
    on_first_batch: Any = None,
    show: bool = False,
    guard: Guard | None = None,
    curve: bool = False,
) -> tuple[loop.RunResult, Any]:
    """A run as the composition root builds it; also returns the compiled step.

    `loader` may be a function of the sample to begin with. With `curve` the loss is drawn, too.
    """
    mesh = mesh or make_mesh(1, jax.devices()[:1])
    is_trainable = everything
    resume_from = prepare_run_folder(folder, resume=resume, overwrite=False)
    if guard is not None:
        guard.committed = lambda: resume_from
    store = CheckpointStore(
        folder, keep_period=keep_period, assets={"toy/norm_stats.json": "{}"}, settings={"ema_decay": ema_decay}
    )
    abstract = start.abstract_state(init_params, TX, is_trainable, ema_decay, mesh, min_num_elements=1)
    if resume_from is None:
        state, position = start.fresh_state(init_params, jax.random.key(0), abstract, TX, is_trainable, ema_decay), None
    else:
        state, position = store.restore(resume_from, abstract)
    step = make_train_step(loss_fn, TX, SCHEDULE, is_trainable, ema_decay)
    batch = loop.abstract_batch(next(batches()).batch, BATCH, mesh)
    compiled = loop.compile_ahead(step, mesh, abstract, batch, jax.random.key(1))
    writer = MetricsWriter if curve else WithoutCurve
    metrics = writer(folder, resume_step=int(state.step), enabled=jax.process_index() == 0)
    next_sample = position.next_sample if position and position.next_sample is not None else 0
    try:
        result = loop.run(
            compiled,
            state,
            jax.random.key(1),
            loader(next_sample) if callable(loader) else loader or batches(next_sample, bad_sample),
            loop.LoopConfig(
                num_train_steps=num_steps, batch_size=BATCH, log_interval=log_interval, save_interval=save_interval
            ),
            mesh,
            store,
            metrics,
            position=position,
            on_first_batch=on_first_batch,
            show=show,
            guard=guard,
        )
    finally:
        metrics.close()
        store.close()
    return result, compiled


def leaves(state: TrainState) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
