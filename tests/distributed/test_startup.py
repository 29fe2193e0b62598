"""Two real processes that do not fit together stop together, before anything is compiled, and say why."""

import pathlib
import subprocess
import sys
import time

import pytest

from tests.conftest import REPO
from tests.distributed.test_devices import cluster_of_two


def start(*command: object, env: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=REPO,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs_of_refused(*processes: "subprocess.Popen[str]") -> list[str]:
    """What they printed; each must have ended with one message and exit code 2."""
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 2, output
        assert output.count("error: ") == 1 and "Traceback" not in output
    return outputs


def train_two(*options: tuple[str, ...]) -> list[str]:
    """scripts/train.py with options for rank 0 and for rank 1."""
    common = ("scripts/train.py", "pi05_demo", "--exp-name=two")
    return outputs_of_refused(
        *(start(*common, *own, env=env) for own, env in zip(options, cluster_of_two(), strict=True))
    )


def test_other_options_are_named_with_their_ranks(tmp_path: pathlib.Path) -> None:
    folder = f"--checkpoint-base-dir={tmp_path}"
    outputs = train_two((folder, "--batch-size=8"), (folder, "--batch-size=4", "--seed=7", "--num-workers=5"))
    for output in outputs:
        assert "--batch-size: 8 on rank 0; 4 on rank 1\n" in output
        assert "--seed: 42 on rank 0; 7 on rank 1\n" in output
        assert "--num-workers" not in output  # may differ
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", ["other", "file/below"])
def test_a_folder_that_is_not_shared_is_found_out(tmp_path: pathlib.Path, other: str) -> None:
    (tmp_path / "file").touch()
    bases = (tmp_path / "first", tmp_path / other)
    outputs = train_two(*((f"--checkpoint-base-dir={base}", "--shared-storage-timeout-s=1") for base in bases))
    for output in outputs:
        assert "not seen within 1 s by\n    rank 1, " in output and "rank 0, " not in output
        assert str(bases[0]) in output and str(bases[1]) in output
        assert "--checkpoint-base-dir must be one folder on storage that all nodes share" in output
    assert list(bases[0].iterdir()) == []  # the token is gone
    assert not bases[1].exists()


def test_a_folder_that_cannot_be_used_stops_both(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    for output in train_two(*((f"--checkpoint-base-dir={tmp_path / 'file' / 'below'}",) for _ in range(2))):
        assert "Rank 0 cannot use the checkpoint folder" in output


def test_a_folder_that_only_rank_0_can_write_to_stops_both(tmp_path: pathlib.Path) -> None:
    worker = ("-m", "tests.distributed.startup_worker", tmp_path, "readonly")
    for output in outputs_of_refused(*(start(*worker, env=env) for env in cluster_of_two())):
        assert "but not every process can write to what rank 0 makes there:\n    rank 1, " in output
        assert "rank 0, " not in output and "the same user" in output
    assert list(tmp_path.iterdir()) == []


def test_the_mistake_of_one_node_stops_both(tmp_path: pathlib.Path) -> None:
    worker = ("-m", "tests.distributed.startup_worker", tmp_path, "mistake")
    outputs = outputs_of_refused(*(start(*worker, env=env) for env in cluster_of_two()))
    for output, message in zip(outputs, ("rank 1: nothing lies there", "nothing lies there"), strict=True):
        assert f"error: {message}\n" in output


def test_slow_shared_storage_passes_and_a_full_disk_stops_both(tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "first", tmp_path / "mounted_elsewhere"
    processes = [
        start("-m", "tests.distributed.startup_worker", base, env=env)
        for base, env in zip((first, second), cluster_of_two(), strict=True)
    ]
    deadline_s = time.monotonic() + 60
    while not first.is_dir() or not list(first.iterdir()):
        assert all(process.poll() is None for process in processes) and time.monotonic() < deadline_s
        time.sleep(0.05)
    time.sleep(1)
    assert list(first.glob(".shared-*"))  # rank 0 waits for rank 1, which sees the folder from now on
    second.symlink_to(first)
    for output in outputs_of_refused(*processes):
        assert "passed\n" in output
        assert "one takes 372529029.8 GiB" in output and "choose another --checkpoint-base-dir" in output
    assert list(first.iterdir()) == []
