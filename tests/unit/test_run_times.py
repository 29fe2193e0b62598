"""The line at a run's end: from times that the test sets."""

import pytest

from openpi_accel.train import run_times
from openpi_accel.train.run_times import RunTimes


def test_median_and_share_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(run_times.time, "perf_counter", lambda: now)
    monkeypatch.setattr(run_times, "peak_memory_gib", lambda: {"host_memory_peak_gib": 3.04})
    times = RunTimes(batch_size=8)
    # The third step waits for a checkpoint; the first one's wait is start-up.
    for took_s, wait_s in ((0, 50), (2, 0.5), (30, 0), (2, 1.5), (2, 1.6)):
        now += took_s
        assert times.summary() is None or took_s == 2
        times.step_done(wait_s)
    summary = times.summary()
    assert summary is not None
    assert summary.startswith("5 steps: median 2.000 s a step (4.0 samples/s), 10 % of the time waiting for data")
    assert "peak memory 3.0 GiB of this process" in summary and "device" not in summary
    monkeypatch.setattr(
        run_times, "peak_memory_gib", lambda: {"host_memory_peak_gib": 3.04, "device_memory_peak_gib": 65.75}
    )
    assert "65.8 GiB of a device, 3.0 GiB of this process" in (times.summary() or "")


def test_a_run_of_two_steps_says_nothing() -> None:
    times = RunTimes(batch_size=8)
    times.step_done(0.0)
    times.step_done(0.0)
    assert times.summary() is None
