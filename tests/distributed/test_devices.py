"""Any number of devices and processes gives the same run, and a checkpoint moves between them."""

import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.train.metrics import read_rows
from openpi_accel.train.run_folder import committed_steps
from tests.conftest import REPO
from tests.unit import toy


def run_worker(
    *args: object, env: dict[str, str] | None = None, python: str = sys.executable, module: str = "worker"
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [python, "-m", f"tests.distributed.{module}", *map(str, args)],
        cwd=REPO,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def cluster_of(size: int) -> list[dict[str, str]]:
    """The platform's variables of so many processes on this machine, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    return [shared | {"RANK": str(rank)} for rank in range(size)]


def cluster_of_two() -> list[dict[str, str]]:
    return cluster_of(2)


def finish(*processes: "subprocess.Popen[str]", within_s: float = 120) -> None:
    outputs = [process.communicate(timeout=within_s)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output


def dumped(path: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def losses(folder: pathlib.Path) -> list[tuple[int, float, float, str]]:
    rows = read_rows(folder / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"], row["sample_ids_hash"]) for row in rows]


def assert_close(got: list[tuple[int, float, float, str]], expected: list[tuple[int, float, float, str]]) -> None:
    assert [(step, ids) for step, *_, ids in got] == [(step, ids) for step, *_, ids in expected]
    np.testing.assert_allclose([row[1:3] for row in got], [row[1:3] for row in expected], rtol=2e-5)


@pytest.mark.parametrize("fsdp", [1, 4, 8])
def test_eight_devices_train_as_one(tmp_path: pathlib.Path, fsdp: int) -> None:
    assert jax.device_count() == 8
    toy.train(tmp_path / "one", 6)
    result, step = toy.train(tmp_path / "eight", 6, mesh=make_mesh(fsdp))
    assert isinstance(step, jax.stages.Compiled)  # which runs the one program and traces no other
    kernel = result.state.params["hidden"]["kernel"]
    shards = {shard.data.shape for shard in kernel.addressable_shards}
    assert shards == {(16, 64 // fsdp)} and len(kernel.addressable_shards) == 8
    assert result.state.opt_state[1][0].mu["hidden"]["kernel"].sharding == kernel.sharding
    assert_close(losses(tmp_path / "eight"), losses(tmp_path / "one"))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_checkpoint_of_eight_devices_goes_on_with_fewer(tmp_path: pathlib.Path, devices: int) -> None:
    assert jax.device_count() == 8
    toy.train(tmp_path / "straight", 6, mesh=make_mesh(8))
    eight, _ = toy.train(tmp_path / "moved", 4, mesh=make_mesh(8))
    options = ("--devices", devices, "--expect-devices", devices, "--fsdp", devices, "--resume", "--dump")
    finish(run_worker(tmp_path / "moved", 4, *options, tmp_path / "dump.npz"))  # nothing to do: the restored state
    restored = dumped(tmp_path / "dump.npz")
    for name, leaf in zip(restored, toy.leaves(eight.state), strict=True):
        np.testing.assert_array_equal(restored[name], leaf, err_msg=name)
    finish(run_worker(tmp_path / "moved", 6, *options[:-1]))
    assert_close(losses(tmp_path / "moved"), losses(tmp_path / "straight"))


def test_a_checkpoint_moves_to_other_arrangements_and_nodes(tmp_path: pathlib.Path) -> None:
    """Saved by 2 x 4 devices of one node, gone on with by two nodes of 2 x 2, then by 8 in one group."""
    assert jax.device_count() == 8
    run = tmp_path / "moved"
    toy.train(tmp_path / "straight", 6)
    toy.train(run, 2, mesh=make_mesh(4))
    options = ("--devices", 4, "--expect-devices", 8, "--fsdp", 2, "--resume")
    finish(*(run_worker(run, 4, *options, env=env) for env in cluster_of_two()))
    toy.train(run, 6, mesh=make_mesh(8), resume=True)
    assert_close(losses(run), losses(tmp_path / "straight"))


def test_two_processes_train_save_and_resume_as_one(tmp_path: pathlib.Path) -> None:
    toy.train(tmp_path / "one", 6)
    for num_steps, extra in ((3, ()), (6, ("--resume",))):
        cluster = cluster_of_two()
        options = ("--devices", 2, "--expect-devices", 4, "--fsdp", 2, *extra)
        finish(
            *(
                run_worker(
                    *(tmp_path / "two", num_steps, *options, "--dump", tmp_path / f"dump{rank}.npz"),
                    env=env,
                )
                for rank, env in enumerate(cluster)
            )
        )
    assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"))
    first, second = (dumped(tmp_path / f"dump{rank}.npz") for rank in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("told", [0, 1])
def test_sigterm_to_one_process_stops_all_after_the_same_step(tmp_path: pathlib.Path, told: int) -> None:
    folder, options = tmp_path / "two", ("--expect-devices", 2)
    processes = [run_worker(folder, 1_000_000, *options, env=env) for env in cluster_of_two()]
    deadline_s = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() or len(read_rows(folder / "metrics.jsonl")) < 3:
        assert all(process.poll() is None for process in processes) and time.monotonic() < deadline_s
        time.sleep(0.1)
    processes[told].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [143, 143], outputs
    (saved,) = committed_steps(folder)
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == list(range(saved + 1))  # the last one read
    finish(*(run_worker(folder, saved + 3, *options, "--resume", env=env) for env in cluster_of_two()))
    toy.train(tmp_path / "straight", saved + 3)
    assert_close(losses(folder)[-4:], losses(tmp_path / "straight")[-4:])
