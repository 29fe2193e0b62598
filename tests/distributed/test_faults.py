"""What happens to one of two processes ends both, with a message, and a restart goes on to the last bit."""

import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from openpi_accel.train.run_folder import committed_steps
from tests.conftest import REPO
from tests.distributed.test_devices import cluster_of_two, losses

SAVED, ALL = 5, 12  # the checkpoint that the faults find, and the steps of a whole run
END_S = 60
START_S = 120  # the machine may be busy

type Start = Callable[..., list[Process]]


class Process:
    """One of the two; what it prints is read all the time."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.popen = subprocess.Popen(
            command,
            cwd=REPO,
            env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        self._lines.extend(self.popen.stdout)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait(self, deadline_s: float) -> int:
        code = self.popen.wait(timeout=max(0.0, deadline_s - time.monotonic()))
        self._reader.join(timeout=10)
        return code


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts both processes, with options for both and for each."""
    started: list[Process] = []

    def both(folder: pathlib.Path, num_steps: int, *common: str, own: tuple[str, str] = ("", "")) -> list[Process]:
        pair = []
        for rank, env in enumerate(cluster_of_two()):
            command = [folder, num_steps, *common, *own[rank].split()]
            pair.append(Process([sys.executable, "-m", "tests.distributed.fault_worker", *map(str, command)], env))
        started.extend(pair)
        return pair

    yield both
    for process in started:
        process.popen.kill()
        process.popen.wait()


def wait_for(happened: Callable[[], object], processes: list[Process]) -> None:
    deadline_s = time.monotonic() + START_S
    while not happened():
        assert all(process.popen.poll() is None for process in processes), [p.output for p in processes]
        assert time.monotonic() < deadline_s, [p.output for p in processes]
        time.sleep(0.05)


def end(*processes: Process, within_s: float = END_S) -> list[int]:
    deadline_s = time.monotonic() + within_s
    return [process.wait(deadline_s) for process in processes]


def finish(processes: list[Process]) -> None:
    assert end(*processes, within_s=START_S) == [0, 0], [process.output for process in processes]


@pytest.fixture(scope="module")
def straight(start: Start, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run to which nothing happens."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    finish(start(folder, ALL))
    return folder


@pytest.fixture
def begun(straight: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """That run as it was after its first checkpoint."""
    folder = pathlib.Path(shutil.copytree(straight, tmp_path / "run"))
    for step in committed_steps(folder):
        if step != SAVED:
            shutil.rmtree(folder / str(step))
    return folder


def goes_on(start: Start, folder: pathlib.Path, straight: pathlib.Path) -> None:
    """From the last committed step, with the very losses of the run to which nothing happened."""
    assert committed_steps(folder) == [SAVED]
    finish(start(folder, ALL, "--resume"))
    assert committed_steps(folder)[-1] == ALL - 1
    assert losses(folder) == losses(straight) and len(losses(folder)) == ALL


def test_killed_while_the_other_is_in_a_collective(start: Start, begun: pathlib.Path, straight: pathlib.Path) -> None:
    # As in training, JAX's own watch takes so much longer that this process has left by itself before.
    survivor, victim = start(begun, ALL, "--resume", "--heartbeat-timeout-s", "30", own=("", "--hold data"))
    wait_for(
        lambda: "it waits for rank 1: rank 1 is waiting for data, in step 8" in survivor.output, [survivor, victim]
    )
    victim.popen.kill()
    assert end(survivor, victim) == [134, -signal.SIGKILL], survivor.output
    message = "error: rank 1 ended without a word: nothing was heard for 4 s."
    assert message in survivor.output and "checkpoint 5 is complete" in survivor.output
    assert "Traceback" not in survivor.output and "Check failure" not in survivor.output
    goes_on(start, begun, straight)


def assert_told_that_rank_0_is_gone(survivor: Process) -> None:
    """Where rank 0 dies, JAX's store dies with it, and JAX aborts the others at once; the last words are ours."""
    last = survivor.output.splitlines()[-1]
    assert last.startswith("error: rank 0 ended without a word: 127.0.0.1:"), survivor.output
    assert "Connection refused" in last and "go on with --resume (launchers: RESUME=1)" in last
    assert "Traceback" not in survivor.output


def test_rank_0_killed_while_the_other_is_in_a_collective(
    start: Start, begun: pathlib.Path, straight: pathlib.Path
) -> None:
    victim, survivor = start(begun, ALL, "--resume", "--heartbeat-timeout-s", "30", own=("--hold data", ""))
    wait_for(lambda: "it waits for rank 0: rank 0 is waiting for data, in step 8" in victim.output, [victim, survivor])
    victim.popen.kill()
    assert end(victim, survivor) == [-signal.SIGKILL, 134], survivor.output
    assert_told_that_rank_0_is_gone(survivor)
    assert "checkpoint 5 is complete" in survivor.output
    goes_on(start, begun, straight)


@pytest.mark.parametrize(("held", "victim"), [("data", 1), ("data", 0), ("compile", 0), ("save", 0)])
def test_killed_while_both_are_held_up(
    start: Start, begun: pathlib.Path, straight: pathlib.Path, held: str, victim: int
) -> None:
    processes = start(begun, ALL, "--resume", "--hold", held)
    wait_for(lambda: all((begun / f"held-{rank}").exists() for rank in range(2)), processes)
    processes[victim].popen.kill()
    codes = end(*processes)
    shown = processes[1 - victim].output
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 134, shown
    if victim == 0:
        assert_told_that_rank_0_is_gone(processes[1])
    else:
        assert "error: rank 1 ended without a word" in shown and "nothing was heard" in shown
    assert "checkpoint 5 is complete" in shown
    goes_on(start, begun, straight)


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("--raise corrupt", 2, "episode 3, frame 17 cannot be decoded"),
        ("--raise fault", 1, "KeyError: 'an unforeseen fault'"),
    ],
)
def test_what_goes_wrong_in_one_is_told_by_both(
    start: Start, begun: pathlib.Path, what: str, code: int, words: str
) -> None:
    processes = start(begun, ALL, "--resume", own=("", what))
    codes = end(*processes, within_s=START_S)
    other, own = (process.output for process in processes)
    assert codes == [code, code], (other, own)
    assert other.count("error: rank 1: ") == 1 and words in other and "Traceback" not in other
    assert "checkpoint 5 is complete: go on with --resume" in other
    assert own.count(f"error: {words}") == (code == 2) and own.count(f"\n{words}\n") == (code == 1)
    assert "Check failure" not in other + own and "terminat" not in other + own
    assert committed_steps(begun) == [SAVED]


def test_a_full_disk_in_one_ends_both(start: Start, begun: pathlib.Path, straight: pathlib.Path) -> None:
    processes = start(begun, ALL, "--resume", own=("", "--full-disk"))
    codes = end(*processes, within_s=START_S)
    other, own = (process.output for process in processes)
    assert codes == [2, 2], (other, own)
    for shown, name in ((other, "error: rank 1: "), (own, "error: ")):
        assert shown.count(f"{name}A checkpoint could not be written to {begun}") == 1
        assert f"The older checkpoint {begun}/{SAVED} is complete and stays" in shown and "Check failure" not in shown
    goes_on(start, begun, straight)


def test_a_save_that_stalls_does_not_outlast_the_grace(
    start: Start, begun: pathlib.Path, straight: pathlib.Path
) -> None:
    options = ("--resume", "--grace-s", "8", "--exit-code", "75", "--hold", "save", "--save-interval", "1000000")
    processes = start(begun, 10**6, *options)
    wait_for(lambda: len(losses(begun)) > ALL + 2, processes)
    processes[1].popen.send_signal(signal.SIGTERM)
    told_s = time.monotonic()
    assert end(*processes) == [75, 75], [process.output for process in processes]
    assert time.monotonic() - told_s < 8
    assert (begun / "held-0").exists()  # it was begun
    for process in processes:
        assert "SIGTERM: --grace-s 8 is nearly over" in process.output and "checkpoint 5 is" in process.output
    goes_on(start, begun, straight)


@pytest.mark.parametrize("told", [0, 1])
def test_no_process_begins_a_save_that_one_slow_disk_would_not_complete_in_time(
    start: Start, begun: pathlib.Path, told: int
) -> None:
    # Steps are slow after the save, so that SIGTERM comes between two saves.
    options = ("--resume", "--save-interval", "13", "--at", "13", "--pace-s", "0.5", "--grace-s", "5")
    processes = start(begun, 10**6, *options, own=("", "--slow-disk-s 4"))
    wait_for(lambda: 13 in committed_steps(begun), processes)
    processes[told].popen.send_signal(signal.SIGTERM)
    assert end(*processes) == [143, 143], [process.output for process in processes]
    told_by_all = {line for process in processes for line in process.output.splitlines() if "stopped: " in line}
    assert len(told_by_all) == 1 and all("stopped: " in process.output for process in processes)
    (text,) = told_by_all
    assert "of --grace-s 5, so none was begun; checkpoint 13 is complete: go on with --resume" in text
    assert committed_steps(begun) == [SAVED, 13]
    assert not [entry.name for entry in begun.iterdir() if "tmp" in entry.name]
