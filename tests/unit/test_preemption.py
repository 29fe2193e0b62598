"""SIGTERM: is there still time for a save?"""

import math
import signal

import pytest

from openpi_accel.train.preemption import Preemption
from openpi_accel.train.save_time import ASSUMED_BYTES_PER_S, SAFETY, SaveTimer
from tests.unit.test_watchdog import Clock


def test_the_first_save_is_judged_by_its_bytes_and_later_ones_by_the_last() -> None:
    now = Clock()
    timer = SaveTimer(now)
    assert timer.predict_s(int(10 * ASSUMED_BYTES_PER_S)) == pytest.approx(10 * SAFETY)
    timer.began(3)
    now.now_s += 4
    # What is under way comes first: 6 s more of it, by its bytes.
    assert timer.predict_s(int(10 * ASSUMED_BYTES_PER_S)) == pytest.approx((6 + 10) * SAFETY)
    assert timer.committed is None
    now.now_s += 4
    timer.ended()
    assert timer.committed == 3
    assert timer.predict_s(10**15) == pytest.approx(8 * SAFETY)
    timer.began(6)
    now.now_s += 30  # longer than the last one
    assert timer.predict_s(10**15) == pytest.approx(8 * SAFETY) and timer.committed == 3


@pytest.mark.parametrize(("grace_s", "early_s"), [(30, 4), (8, 2)])
def test_a_save_is_begun_if_it_fits(grace_s: float, early_s: float) -> None:
    now = Clock()
    preemption = Preemption(grace_s, 75, now)
    assert preemption.left_s() == math.inf and not preemption.too_late_to_save(1e9)
    preemption.note(signal.SIGTERM)
    now.now_s += 3
    preemption.note(signal.SIGTERM)  # the grace runs from the first
    left_s = grace_s - early_s - 3
    assert preemption.left_s() == left_s and preemption.exit_code == 75
    assert preemption.too_late_to_save(left_s) == ""
    text = preemption.too_late_to_save(left_s + 1)
    assert text == (
        f"a save takes about {left_s + 1:.0f} s, and {left_s:.0f} s are left of --grace-s {grace_s}, so none was begun"
    )


def test_ctrl_c_has_no_grace() -> None:
    preemption = Preemption(1, 75, Clock())
    preemption.note(signal.SIGINT)
    assert preemption.exit_code == 130 and preemption.left_s() == math.inf
    assert preemption.too_late_to_save(1e9) == ""


def test_sigterm_after_ctrl_c_counts() -> None:
    """Some schedulers send both; the kill follows SIGTERM."""
    preemption = Preemption(20, 75, Clock())
    preemption.note(signal.SIGINT)
    preemption.note(signal.SIGTERM)
    assert preemption.exit_code == 75 and preemption.left_s() < 20
    assert "none was begun" in preemption.too_late_to_save(1e9)
    preemption.note(signal.SIGINT)
    assert preemption.exit_code == 75
