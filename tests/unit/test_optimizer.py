"""Schedule and optimizer against their formulas, written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_accel.config.presets import PRESETS
from openpi_accel.config.schema import OptimizerConfig, ScheduleConfig
from openpi_accel.orbax_tree import by_path
from openpi_accel.train.optimizer import make_optimizer, make_schedule


@pytest.mark.parametrize("name", ["pi05_libero", "pi0_libero"])
def test_schedule_is_linear_then_cosine(name: str) -> None:
    config = PRESETS[name].lr_schedule
    schedule = make_schedule(config)
    for step in (0, 1, config.warmup_steps // 2, config.warmup_steps, config.decay_steps // 2, config.decay_steps):
        if step < config.warmup_steps:
            start = config.peak_lr / (config.warmup_steps + 1)
            expected = start + (config.peak_lr - start) * step / config.warmup_steps
        else:
            share = (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
            expected = config.decay_lr + (config.peak_lr - config.decay_lr) * (1 + np.cos(np.pi * share)) / 2
        # optax sums terms of the size of the peak in float32
        assert float(schedule(jnp.int32(step))) == pytest.approx(expected, rel=1e-6, abs=2**-22 * config.peak_lr)


def test_schedule_stays_at_its_end() -> None:
    schedule = make_schedule(ScheduleConfig(warmup_steps=2, peak_lr=1.0, decay_steps=10, decay_lr=0.25))
    assert float(schedule(jnp.int32(1000))) == pytest.approx(0.25)


def test_adamw_after_clipping_is_the_paper_s_update() -> None:
    config = OptimizerConfig(weight_decay=0.1)
    tx = make_optimizer(config, lambda count: 0.01 * (count + 1))
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[3.0]])}
    grads = [
        {"a": jnp.array([3.0, 4.0]), "b": jnp.array([[12.0]])},
        {"a": jnp.array([0.1, 0.0]), "b": jnp.array([[0.2]])},
    ]
    state = tx.init(params)
    w = np.array([1.0, -2.0, 3.0])
    m, v = np.zeros(3), np.zeros(3)
    for t, grad in enumerate(grads, start=1):
        updates, state = tx.update(grad, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        g = np.array([*np.asarray(grad["a"]), float(grad["b"][0, 0])], np.float64)
        g *= min(1.0, config.clip_gradient_norm / np.linalg.norm(g))  # the first is 13 long, the second is not clipped
        m = config.b1 * m + (1 - config.b1) * g
        v = config.b2 * v + (1 - config.b2) * g**2
        adam = m / (1 - config.b1**t) / (np.sqrt(v / (1 - config.b2**t)) + config.eps)
        w = w - 0.01 * t * (adam + config.weight_decay * w)
    np.testing.assert_allclose([*params["a"], float(params["b"][0, 0])], w, rtol=1e-5)


def test_state_is_laid_out_as_upstream_stores_it() -> None:
    tx = make_optimizer(OptimizerConfig(), make_schedule(ScheduleConfig()))
    assert set(by_path(tx.init({"a": {"w": jnp.zeros(2)}}))) == {"1/0/count", "1/0/mu/a/w", "1/0/nu/a/w", "1/2/count"}
