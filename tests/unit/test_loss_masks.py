"""What the loss leaves out on request: steps past the episode's end, dimensions that the data does not have."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_accel.config.schema import DataConfig, LossConfig, ModelConfig
from openpi_accel.data.mapping import resolve_mapping
from openpi_accel.data.pipeline import BatchSource
from openpi_accel.data.tokenizer import PromptTokenizer
from openpi_accel.objective import draw_noise_time, loss_weights, make_loss_fn
from openpi_accel.types import Batch, Observation
from tests.data_fakes import FakeDataset, unit_stats, write_tokenizer

HORIZON = 50


class Linear:
    """A velocity that depends on one parameter."""

    def __init__(self, params):
        self.slope = params["slope"]

    def velocity(self, obs, x_t, time):
        return self.slope * x_t + time[:, None, None]


def loss_of(params, batch, key):
    return make_loss_fn(Linear, lambda rng, images: images)(params, batch, key)


def errors_of(slope, batch, key):
    """B A E squared errors, written out once more."""
    _, noise_rng, time_rng = jax.random.split(key, 3)
    noise, time = draw_noise_time(noise_rng, time_rng, batch.actions.shape)
    t = time[:, None, None]
    x_t = t * noise + (1 - t) * batch.actions
    return jnp.square(slope * x_t + t - (noise - batch.actions))


@pytest.fixture
def make(tmp_path):
    def make(loss=None):
        dataset = FakeDataset((5, 60), action_dim=3)
        data, model = DataConfig(repo_id="x"), ModelConfig(action_horizon=HORIZON, discrete_state_input=False)
        mapping = resolve_mapping(data, dataset)
        return BatchSource(
            dataset=dataset, mapping=mapping, model=model, data=data,
            norm_stats=unit_stats(mapping.state_dim, mapping.action_dim),
            tokenizer=PromptTokenizer(write_tokenizer(tmp_path), max_token_len=48, vocab_size=512),
            **({} if loss is None else {"loss": loss}),
        )  # fmt: skip

    return make


ROWS = np.array([0, 3, 5, 64])  # frames 0 and 3 of an episode of 5; the first and the last frame of one of 60
VALID_STEPS = [5, 2, 50, 1]


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("dims", [False, True])
def test_the_mean_is_over_what_counts(make, steps, dims):
    batch = make(LossConfig(mask_padded_steps=steps, mask_padded_dims=dims)).load_batch(ROWS)
    expected = np.zeros((4, HORIZON, 32), bool)
    for i, count in enumerate(VALID_STEPS):
        expected[i, : count if steps else HORIZON, : 3 if dims else 32] = True
    key, slope = jax.random.key(3), 0.3
    errors = np.asarray(errors_of(slope, batch, key), np.float64)
    loss, grad = jax.value_and_grad(loss_of)({"slope": jnp.float32(slope)}, batch, key)
    np.testing.assert_allclose(loss, errors[expected].mean(), rtol=1e-5)
    if not (steps or dims):
        assert batch.action_mask is None
        return
    np.testing.assert_array_equal(batch.action_mask, expected)
    # What does not count has no part in the gradient: any other actions there give the same.
    other = dataclasses.replace(batch, actions=np.where(expected, batch.actions, np.float32(9)))
    loss_other, grad_other = jax.value_and_grad(loss_of)({"slope": jnp.float32(slope)}, other, key)
    np.testing.assert_array_equal(loss_other, loss)
    np.testing.assert_array_equal(grad_other["slope"], grad["slope"])


def test_off_is_what_it_was_to_the_bit(make):
    plain, off = make().load_batch(ROWS), make(LossConfig()).load_batch(ROWS)
    assert jax.tree.structure(plain) == jax.tree.structure(off)
    assert len(jax.tree.leaves(plain)) == len(jax.tree.leaves(plain.observation)) + 1
    key = jax.random.key(0)
    errors = errors_of(jnp.float32(0.3), plain, key)
    np.testing.assert_array_equal(loss_of({"slope": jnp.float32(0.3)}, plain, key), jnp.mean(jnp.mean(errors, axis=-1)))


def test_weights():
    assert loss_weights(None) is None
    mask = jnp.array([[[True, False], [False, False]]])
    np.testing.assert_array_equal(loss_weights(mask), [[[4, 0], [0, 0]]])
    assert not loss_weights(jnp.zeros((1, 2, 2), bool)).any()
    assert Batch(observation=Observation, actions=mask).action_mask is None
