"""Held-out episodes: whole ones, chosen by the seed; their loss is measured with the same randomness every time."""

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_accel.build.data import Data
from openpi_accel.config.presets import get_preset
from openpi_accel.data.rows import hold_out
from openpi_accel.errors import UserError
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.train.metrics import MetricsWriter, read_rows
from openpi_accel.train.progress import ProgressReport
from openpi_accel.train.validation import Validation
from openpi_accel.train.watch import LoopConfig, StepWatch
from openpi_accel.types import TrainState
from tests.data_fakes import FakeDataset


def test_whole_episodes_by_the_seed():
    dataset = FakeDataset(tuple(range(3, 13)))
    rows = np.arange(dataset.num_frames)
    train, held_out = hold_out(dataset, rows, 0.3, 42)
    assert sorted([*train, *held_out]) == rows.tolist()
    episodes = {int(e) for e in dataset.episode_of(held_out)}
    assert len(episodes) == 3 and not episodes & {int(e) for e in dataset.episode_of(train)}
    np.testing.assert_array_equal(hold_out(dataset, rows, 0.3, 42)[1], held_out)
    others = [tuple(np.unique(dataset.episode_of(hold_out(dataset, rows, 0.3, seed)[1]))) for seed in range(8)]
    assert len(set(others)) > 3
    some = rows[dataset.episode_of(rows) < 4]
    assert len(np.unique(dataset.episode_of(hold_out(dataset, some, 0.01, 0)[1]))) == 1
    assert len(hold_out(dataset, rows, 0, 0)[1]) == 0
    with pytest.raises(UserError, match="none is left to train"):
        hold_out(FakeDataset((4,)), np.arange(4), 0.5, 0)


class Rows:
    """A source whose batches are the rows."""

    dataset = FakeDataset((9, 14))

    def load_batch(self, rows):
        return rows


@pytest.mark.parametrize(("size", "limit", "count"), [(4, 8, 4), (4, 2, 2), (16, 8, 1)])
def test_the_same_batches_every_time(size, limit, count):
    config = dataclasses.replace(get_preset("pi05_lerobot"), batch_size=size, val_batches=limit)
    data = Data(
        config=config, source=Rows(), rows=np.arange(9), val_rows=np.arange(9, 23), report=None, norm_stats_text=""
    )
    first, second = list(data.validation_batches()), list(data.validation_batches())
    np.testing.assert_array_equal(first, second)
    assert len(first) == count and all(len(batch) == size for batch in first)
    drawn = np.concatenate(first)
    assert set(drawn) <= set(range(9, 23)) and len(set(drawn)) == min(14, size * count)


def test_the_loss_is_of_the_averaged_weights_and_of_fixed_noise():
    mesh = make_mesh(1)
    batches = [np.full((8, 2), value, np.float32) for value in (1, 3)]

    def loss_fn(params, batch, rng):
        return params["w"] * jnp.mean(batch) + jax.random.normal(rng)

    validation = Validation(loss_fn=loss_fn, batches=lambda: iter(batches), interval=10, seed=5, mesh=mesh)
    noise = [float(jax.random.normal(jax.random.fold_in(jax.random.key(5), i))) for i in range(2)]
    raw = TrainState(step=jnp.int32(3), params={"w": jnp.float32(2)}, opt_state=(), ema_params=None)
    averaged = dataclasses.replace(raw, ema_params={"w": jnp.float32(7)})
    np.testing.assert_allclose(validation.loss(raw), 2 * 2 + np.mean(noise), rtol=1e-6)
    np.testing.assert_allclose(validation.loss(averaged), 7 * 2 + np.mean(noise), rtol=1e-6)
    assert validation.loss(raw) == validation.loss(raw)


def test_it_is_shown_written_and_drawn(tmp_path):
    metrics, shown = MetricsWriter(tmp_path), io.StringIO()
    config = LoopConfig(num_train_steps=5, batch_size=2, log_interval=1, save_interval=9)
    watch = StepWatch(config, tmp_path, metrics, ProgressReport(5, 0, shown), {})
    values = {name: jnp.float32(1) for name in ("loss", "grad_norm", "param_norm", "learning_rate")}
    watch.started(0, values, np.arange(2), 0.0)
    watch.validated(0, lambda state: 0.25, None)
    metrics.save_loss_curve()
    metrics.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [set(row) & {"loss", "val_loss"} for row in rows] == [{"loss"}, {"val_loss"}] and rows[1]["val_loss"] == 0.25
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["step"] == 0
    assert "validation loss 0.2500" in shown.getvalue() and (tmp_path / "loss_curve.png").is_file()
