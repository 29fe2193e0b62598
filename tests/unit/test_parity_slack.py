"""What rounding may move in Adam's first update: much where a gradient is as small as epsilon, else next to nothing."""

import numpy as np
import pytest

from openpi_accel.tools.parity_train import _first_update_slack

RATE, EPS = 2.5e-4, 1e-8


def test_slack_is_for_entries_near_epsilon_alone() -> None:
    grads = {"w": np.array([1e-3, -1e-4, 5e-9, 0.0])}
    ordinary, small, near, zero = _first_update_slack(grads, RATE, EPS)["w"]
    assert ordinary < small < 1e-11 and zero == 0
    noise = 7e-6 * 1e-3
    expected = RATE * (5e-9 / 1.5e-8 - (5e-9 - noise) / (abs(5e-9 - noise) + EPS))  # the worse of the two directions
    assert near == pytest.approx(expected, rel=1e-5) and near < 2 * RATE
