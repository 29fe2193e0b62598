"""kill -9 in the middle of a save: the older checkpoint is there, and a restart goes on from it to the last bit."""

import pathlib
import time

from openpi_accel.train.metrics import read_rows
from openpi_accel.train.run_folder import committed_steps
from tests.distributed.test_devices import finish, losses, run_worker
from tests.unit import toy


def test_kill_during_a_save(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    options = ("--expect-devices", 1, "--save-interval", 3)
    process = run_worker(run, 12, *options, "--hang-in-save", 6)
    deadline_s = time.monotonic() + 120
    while not (run / "hanging").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.kill()
    process.communicate()
    leftovers = [entry.name for entry in run.iterdir() if entry.name.startswith("6.")]
    assert leftovers  # it was in the middle
    assert committed_steps(run) == [3]
    finish(run_worker(run, 12, *options, "--resume"))
    assert committed_steps(run) == [11]
    assert not [entry.name for entry in run.iterdir() if "tmp" in entry.name]
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(12))
    toy.train(tmp_path / "straight", 12)
    assert losses(run) == losses(tmp_path / "straight")
