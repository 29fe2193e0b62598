"""Real processes on one machine: a start that lacks somebody, and a process that dies while the other waits for it."""

import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.conftest import REPO

SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "localhost,other"}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start(*options: str, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.waiter", *options],
        cwd=REPO,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_start_without_one_of_three_names_it() -> None:
    cluster = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "3"}
    processes = [start("--start-timeout-s", "6", **cluster, RANK=str(rank)) for rank in (0, 1)]
    for process in processes:
        output = process.communicate(timeout=30)[0]
        assert process.returncode == 2, output
        assert "error: rank 2 of 3 did not come within 6 s; rank 0 and 1 (" in output and "Traceback" not in output


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "its machine is gone"])
def test_a_process_that_dies_ends_the_others(how: signal.Signals) -> None:
    job = SLURM | {"SLURM_JOB_ID": "1", "MASTER_PORT": free_port()}
    survivor, victim = (
        start("--heartbeat-timeout-s", "5", **job, SLURM_PROCID=str(rank), SLURM_NODEID=str(rank)) for rank in (0, 1)
    )
    try:
        assert victim.stdout is not None and survivor.stdout is not None
        for rank, stdout in ((0, survivor.stdout), (1, victim.stdout)):
            assert any(line.startswith(f"joined as {rank} of 2") for line in stdout)
        time.sleep(1)  # it is in the collective by now
        victim.send_signal(how)
        died_s = time.monotonic()
        output = survivor.communicate(timeout=60)[0]
        assert time.monotonic() - died_s < 60 and survivor.returncode != 0
        assert "stopped sending heartbeats):\n1\n" in output  # JAX's words: which process it was
    finally:
        for process in (survivor, victim):
            process.kill()
            process.communicate()
