"""Host transforms, piece by piece."""

import numpy as np
import pytest

from openpi_accel.data.norm_stats import NormStats, Statistics
from openpi_accel.data.transforms import NumericTransform, pad_last_axis, to_absolute, to_delta, to_uint8_hwc
from openpi_accel.errors import UserError
from tests.data_fakes import unit_stats


def test_float_chw_truncates_to_the_uint8_it_came_from():
    every = np.arange(256, dtype=np.uint8)
    image = np.stack([every.reshape(16, 16)] * 3, axis=-1)
    as_lerobot_gives_it = np.moveaxis(image, -1, 0).astype(np.float32) / 255
    np.testing.assert_array_equal(to_uint8_hwc(as_lerobot_gives_it), image)
    assert to_uint8_hwc(image) is image
    assert to_uint8_hwc(np.full((3, 4, 4), 0.999, np.float32)).max() == 254


def test_uint8_chw_is_turned():
    image = np.random.default_rng(0).integers(0, 256, (4, 5, 3)).astype(np.uint8)
    np.testing.assert_array_equal(to_uint8_hwc(np.moveaxis(image, -1, 0)), image)


@pytest.mark.parametrize("shape", [(4, 4, 1), (4, 4), (4, 4, 4)])
def test_other_than_three_channels_are_refused(shape):
    with pytest.raises(UserError, match=r"three channels"):
        to_uint8_hwc(np.zeros(shape, np.uint8))


def test_delta_leaves_the_gripper_and_its_input_alone_and_is_undone():
    rng = np.random.default_rng(0)
    actions, state = rng.normal(size=(2, 5, 7)).astype(np.float32), rng.normal(size=(2, 8)).astype(np.float32)
    before = actions.copy()
    deltas = to_delta(actions, state, 6)
    assert deltas.dtype == np.float32
    np.testing.assert_array_equal(actions, before)
    np.testing.assert_array_equal(deltas[..., :6], actions[..., :6] - state[:, None, :6])
    np.testing.assert_array_equal(deltas[..., 6], actions[..., 6])
    np.testing.assert_allclose(to_absolute(deltas, state, 6), actions, atol=1e-6)
    assert to_delta(actions, state, 0) is actions


def test_padding_is_zeros_in_float32():
    padded = pad_last_axis(np.ones((2, 3, 5)), 32)
    assert padded.shape == (2, 3, 32) and padded.dtype == np.float32
    assert padded[..., :5].all() and not padded[..., 5:].any()


def transform(**changes):
    values = dict(normalization="quantile", delta_action_dims=0, state_dim=4, action_dim=3, padded_dim=32)
    return NumericTransform(**({"norm_stats": unit_stats()} | values | changes))


@pytest.mark.parametrize("normalization", ["quantile", "zscore"])
@pytest.mark.parametrize("delta", [0, 2])
def test_restoring_undoes_delta_normalising_and_padding(normalization, delta):
    rng = np.random.default_rng(0)
    stats = Statistics(mean=rng.normal(size=4), std=rng.uniform(1, 2, 4), q01=rng.normal(size=4) - 3, q99=np.ones(4))
    numbers = transform(
        norm_stats=NormStats(state=stats, actions=stats), normalization=normalization, delta_action_dims=delta
    )
    actions, state = rng.normal(size=(2, 5, 3)), rng.normal(size=(2, 4))
    model_sees = numbers.pad(numbers.normalize_actions(actions, state))
    assert model_sees.shape == (2, 5, 32)
    np.testing.assert_allclose(numbers.restore_actions(model_sees, state), actions, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padded_dim": 3}, "state have 4 dimensions, the model takes 3"),
        ({"padded_dim": 2}, "dimensions, the model takes 2"),
        ({"state_dim": 5}, "statistics have 4 dimensions, but the data has 5"),
        ({"action_dim": 4}, "statistics have 3 dimensions, but the data has 4"),
        ({"delta_action_dims": 4}, "--data.delta-action-dims=4"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(changes, message):
    with pytest.raises(UserError, match=message):
        transform(**changes)
