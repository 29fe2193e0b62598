"""The step: what is trained, averaged, logged, and that it is compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from openpi_accel import tree
from openpi_accel.orbax_tree import by_path
from openpi_accel.train.step import init_state, make_train_step, param_norm
from openpi_accel.types import Params

RNG = jax.random.key(3)


def params() -> Params:
    return {
        "body": {"kernel": jnp.full((2, 3), 1.5), "bias": jnp.full((3,), 0.25)},
        "frozen": {"w": jnp.full((3, 3), 1 / 3)},
    }


def is_trainable(path: str) -> bool:
    return not path.startswith("frozen/")


def loss_fn(p: Params, batch: jax.Array, rng: jax.Array) -> jax.Array:
    hidden = batch @ p["body"]["kernel"] + p["body"]["bias"][None]
    return jnp.mean(jnp.square(hidden @ p["frozen"]["w"].astype(jnp.float32)))


def test_frozen_leaves_are_bfloat16_and_never_move() -> None:
    tx = optax.adam(0.1)
    state = init_state(params(), tx, is_trainable, 0.5)
    assert state.params["frozen"]["w"].dtype == jnp.bfloat16
    assert state.params["body"]["kernel"].dtype == jnp.float32
    assert not [path for path in by_path(state.opt_state) if "frozen" in path]
    step = make_train_step(loss_fn, tx, lambda count: 0.1, is_trainable, 0.5)
    after, _ = step(state, jnp.ones((4, 2)), RNG)
    for params_tree in (after.params, after.ema_params):
        assert params_tree is not None
        assert params_tree["frozen"]["w"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(params_tree["frozen"]["w"], state.params["frozen"]["w"])
    assert not np.array_equal(after.params["body"]["kernel"], state.params["body"]["kernel"])


def test_average_starts_at_the_parameters_and_follows_them() -> None:
    tx = optax.sgd(0.1)
    state = init_state(params(), tx, is_trainable, 0.75)
    step = make_train_step(loss_fn, tx, lambda count: 0.1, is_trainable, 0.75)
    after, _ = step(state, jnp.ones((4, 2)), RNG)
    assert after.ema_params is not None
    old, new = (np.asarray(s.params["body"]["kernel"], np.float64) for s in (state, after))
    np.testing.assert_allclose(after.ema_params["body"]["kernel"], 0.75 * old + 0.25 * new, rtol=1e-6)


def test_metrics_are_those_of_the_contract() -> None:
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    state = init_state(params(), tx, is_trainable, None)
    step = make_train_step(loss_fn, tx, lambda count: 0.5 + count, is_trainable, None)
    batch = jnp.ones((4, 2))
    after, metrics = step(state, batch, RNG)
    assert set(metrics) == {"loss", "grad_norm", "param_norm", "learning_rate"}
    assert all(value.dtype == jnp.float32 and value.shape == () for value in metrics.values())
    assert float(metrics["loss"]) == pytest.approx(float(loss_fn(state.params, batch, RNG)))
    trainable, frozen = tree.split(state.params, is_trainable)
    grads = jax.grad(lambda t: loss_fn(tree.merge(t, frozen), batch, RNG))(trainable)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grads)])
    assert float(metrics["grad_norm"]) == pytest.approx(float(np.linalg.norm(flat)), rel=1e-6)
    assert float(metrics["grad_norm"]) > 1e-2  # before clipping
    assert float(metrics["param_norm"]) == pytest.approx(float(param_norm(after.params)))
    assert float(metrics["learning_rate"]) == 0.5
    _, metrics = step(after, batch, RNG)
    assert float(metrics["learning_rate"]) == 1.5


def test_param_norm_leaves_out_vectors_and_named_leaves() -> None:
    tree_of_all = {
        "kernel": jnp.full((2, 2), 3.0),
        "vector": jnp.full((5,), 100.0),
        "x": {name: jnp.full((2, 2), 100.0) for name in ("bias", "scale", "pos_embedding", "input_embedding")},
        "scale": {"kernel": jnp.full((1, 4), 4.0)},
    }
    assert float(param_norm(tree_of_all)) == pytest.approx(10.0)


def test_each_step_draws_from_the_run_s_key_and_its_own_number() -> None:
    def draws(p: Params, batch: jax.Array, rng: jax.Array) -> jax.Array:
        return jax.random.normal(rng) + 0 * p["w"]

    tx = optax.sgd(0.0)
    state = init_state({"w": jnp.zeros(())}, tx, lambda path: True, None)
    step = make_train_step(draws, tx, lambda count: 0.0, lambda path: True, None)
    for number in range(3):
        state, metrics = step(state, jnp.zeros(()), RNG)
        assert float(metrics["loss"]) == float(jax.random.normal(jax.random.fold_in(RNG, number)))
        assert int(state.step) == number + 1


def test_average_without_a_start_is_refused() -> None:
    tx = optax.sgd(0.1)
    state = init_state(params(), tx, is_trainable, None)
    with pytest.raises(ValueError, match="ema_params"):
        make_train_step(loss_fn, tx, lambda count: 0.1, is_trainable, 0.9)(state, jnp.ones((4, 2)), RNG)
