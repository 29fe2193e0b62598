"""What happens to one of two processes ends both, with a message, and a restart goes on to the last bit."""

import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from openpi_accel.train.run_folder import committed_steps
from tests.conftest import REPO
from tests.distributed.test_devices import cluster_of_two, losses

BEGUN, ALL = 6, 12  # steps of the run that the faults come to, and in the end
END_S = 60
START_S = 120  # the machine may be busy

type Process = subprocess.Popen[str]
type Start = Callable[..., list[Process]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts both processes, with options for both and for each; their outputs go to one file each."""
    started: list[Process] = []

    def both(folder: pathlib.Path, num_steps: int, *common: str, own: tuple[str, str] = ("", "")) -> list[Process]:
        pair = []
        for rank, env in enumerate(cluster_of_two()):
            command = [folder, num_steps, *common, *own[rank].split()]
            with (tmp_path_factory.mktemp("log") / "log").open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.distributed.fault_worker", *map(str, command)],
                    cwd=REPO,
                    env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO), **env},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            process.log = pathlib.Path(log.name)  # type: ignore[attr-defined]
            pair.append(process)
        started.extend(pair)
        return pair

    yield both
    for process in started:
        process.kill()
        process.wait()


def output(process: Process) -> str:
    return pathlib.Path(process.log).read_text()  # type: ignore[attr-defined]


def wait_for(happened: Callable[[], object], processes: list[Process]) -> None:
    deadline_s = time.monotonic() + START_S
    while not happened():
        assert all(process.poll() is None for process in processes), [output(process) for process in processes]
        assert time.monotonic() < deadline_s, [output(process) for process in processes]
        time.sleep(0.05)


def end(*processes: Process) -> list[int]:
    """Exit codes; all within a minute from now."""
    deadline_s = time.monotonic() + END_S
    return [process.wait(timeout=deadline_s - time.monotonic()) for process in processes]


def finish(processes: list[Process]) -> None:
    for process in processes:
        assert process.wait(timeout=START_S) == 0, output(process)


@pytest.fixture(scope="module")
def straight(start: Start, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run to which nothing happens."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    finish(start(folder, ALL))
    return folder


@pytest.fixture(scope="module")
def begun_once(start: Start, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs") / "begun"
    finish(start(folder, BEGUN))
    return folder


@pytest.fixture
def begun(begun_once: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A run of its own that has come as far as BEGUN."""
    return pathlib.Path(shutil.copytree(begun_once, tmp_path / "run"))


def goes_on(start: Start, folder: pathlib.Path, straight: pathlib.Path) -> None:
    """From the last committed step, with the very losses of the run to which nothing happened."""
    assert committed_steps(folder) == [BEGUN - 1]
    finish(start(folder, ALL, "--resume"))
    assert committed_steps(folder) == [ALL - 1]
    assert losses(folder) == losses(straight) and len(losses(folder)) == ALL


def test_killed_while_the_other_is_in_a_collective(start: Start, begun: pathlib.Path, straight: pathlib.Path) -> None:
    survivor, victim = start(begun, ALL, "--resume", own=("", "--hold data"))
    wait_for(
        lambda: "it waits for rank 1: rank 1 is waiting for data, in step 8" in output(survivor), [survivor, victim]
    )
    victim.kill()
    assert end(survivor, victim) == [134, -signal.SIGKILL]
    message = "error: rank 1 ended without a word: nothing was heard for 10 s."
    assert message in output(survivor) and "checkpoint 5 is complete" in output(survivor)
    assert "Traceback" not in output(survivor) and "Check failure" not in output(survivor)
    goes_on(start, begun, straight)


# Where rank 0 dies, JAX's store dies with it, and JAX ends the others at once in its own words.
@pytest.mark.parametrize(("held", "victim"), [("data", 1), ("compile", 0), ("save", 0), ("save", 1)])
def test_killed_while_both_are_held_up(
    start: Start, begun: pathlib.Path, straight: pathlib.Path, held: str, victim: int
) -> None:
    processes = start(begun, ALL, "--resume", "--hold", held)
    wait_for(lambda: all((begun / f"held-{rank}").exists() for rank in range(2)), processes)
    processes[victim].kill()
    codes = end(*processes)
    # JAX aborts, or the collective of the step before was still under way and fails.
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] in (-signal.SIGABRT, 134)
    shown = output(processes[1 - victim])
    if victim == 0:
        assert "Either the leader task was preempted/died/restarted unexpectedly" in shown
    else:
        assert "rank 1" in shown and "nothing was heard" in shown
        assert "checkpoint 5 is complete" in shown or held == "compile"
    goes_on(start, begun, straight)


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("--raise corrupt", 2, "episode 3, frame 17 cannot be decoded"),
        ("--raise vanished", 1, "No such file or directory: 'videos/episode_000003.mp4'"),
        ("--raise fault", 1, "KeyError: 'an unforeseen fault'"),
        ("--full-disk", 2, "A checkpoint could not be written to"),
    ],
)
def test_what_goes_wrong_in_one_is_told_by_both(
    start: Start, begun: pathlib.Path, straight: pathlib.Path, what: str, code: int, words: str
) -> None:
    processes = start(begun, ALL, "--resume", own=("", what))
    wait_for_first = time.monotonic() + START_S
    codes = [process.wait(timeout=wait_for_first - time.monotonic()) for process in processes]
    other, own = map(output, processes)
    assert codes == [code, code], (other, own)
    assert other.count("error: rank 1: ") == 1 and words in other and "Traceback" not in other
    assert "continue with --resume" in other or "checkpoint 5 is complete: go on with --resume" in other
    assert words in own and own.count("Traceback") == (code == 1)
    assert "Check failure" not in other + own and "terminat" not in other + own
    goes_on(start, begun, straight)


@pytest.mark.parametrize("told", [0, 1])
def test_a_save_that_stalls_does_not_outlast_the_grace(
    start: Start, begun: pathlib.Path, straight: pathlib.Path, told: int
) -> None:
    options = ("--resume", "--grace-s", "12", "--exit-code", "75", "--hold", "save", "--save-interval", "1000000")
    processes = start(begun, 10**6, *options)
    wait_for(lambda: len(losses(begun)) > BEGUN + 2, processes)
    processes[told].send_signal(signal.SIGTERM)
    told_s = time.monotonic()
    assert end(*processes) == [75, 75], [output(process) for process in processes]
    assert time.monotonic() - told_s < 12
    assert (begun / "held-0").exists()  # it was begun
    for process in processes:
        assert "SIGTERM: --grace-s 12 is nearly over" in output(process) and "checkpoint 5 is" in output(process)
    goes_on(start, begun, straight)
