"""Letterbox resize against upstream's pixels."""

import numpy as np
import pytest

from openpi_accel.data.resize import resize_with_pad


@pytest.mark.shared
def test_every_golden_size_is_exact(shared):
    golden = np.load(shared / "goldens" / "resize_with_pad.npz")
    sizes = [key.removeprefix("in/") for key in golden if key.startswith("in/")]
    assert len(sizes) >= 7
    for size in sizes:
        np.testing.assert_array_equal(resize_with_pad(golden[f"in/{size}"]), golden[f"out/{size}"], err_msg=size)


def test_the_right_size_is_left_alone():
    image = np.arange(224 * 224 * 3, dtype=np.uint32).astype(np.uint8).reshape(224, 224, 3)
    assert resize_with_pad(image) is image


def test_bars_are_black_and_centred():
    result = resize_with_pad(np.full((100, 200, 3), 255, np.uint8))
    assert result.shape == (224, 224, 3)
    white = np.flatnonzero((result == 255).all(axis=(1, 2)))
    assert (white[0], white[-1], len(white)) == (56, 167, 112)
    assert not result[:56].any() and not result[168:].any()


def test_a_very_flat_image_keeps_its_one_row():
    assert resize_with_pad(np.full((1, 224, 3), 9, np.uint8))[111].max() == 9
