"""Worker processes: the same batches, no GPU, nothing left behind whatever happens."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from openpi_accel.data.lerobot.frames import FrameError
from openpi_accel.data.loader import Loader
from openpi_accel.data.order import SampleOrder
from openpi_accel.data.worker_env import worker_cores, worker_environment
from openpi_accel.data.worker_pool import ProcessPool, WorkerDied
from openpi_accel.errors import UserError
from openpi_accel.types import Batch, Observation
from tests.conftest import COMPILING, REPO
from tests.pool_jobs import misbehave


def batch_of(rows: np.ndarray) -> Batch:
    """A batch whose arrays tell the rows; one in Fortran order, one strided, one empty."""
    image = np.repeat(rows.astype(np.uint8), 5000).reshape(len(rows), 50, 100, 1)
    observation = Observation(
        images={"a": image},
        image_masks={"a": np.ones(len(rows), bool)},
        state=np.asfortranarray(np.stack([rows, rows + 1], 1).astype(np.float32)),
        tokenized_prompt=np.arange(2 * len(rows)).reshape(-1, 2)[:, ::2] + rows[:, None],
        tokenized_prompt_mask=np.zeros((len(rows), 0), bool),
    )
    return Batch(observation=observation, actions=np.repeat(rows[:, None], 3, 1).astype(np.float32))


def look_around(rows: np.ndarray) -> dict:
    """What a worker's process sees."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    opened = [os.readlink(entry) for entry in pathlib.Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return {
        "pid": os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "environment": {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS")},
        "gpu": [name for name in ("libcuda.so", "/dev/nvidia") if name in maps or any(name in path for path in opened)],
        "devices": [device.platform for device in jax.devices()],
    }


class Unloadable:
    """Pickles, and cannot be loaded."""

    def __reduce__(self):
        return divide, ()


def divide() -> float:
    return 1 / 0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_same_batches_in_memory_that_is_used_again():
    with Loader(batch_of, SampleOrder(23, 0), 4, num_workers=0) as loader:
        expected = [next(loader) for _ in range(30)]
    with Loader(batch_of, SampleOrder(23, 0), 4, num_workers=2, prefetch_batches=3, start_pool=ProcessPool) as loader:
        kept = []
        for number in range(30):
            found = next(loader)
            np.testing.assert_array_equal(found.sample_ids, expected[number].sample_ids)
            if number < 4:
                kept.append(jax.tree.map(jax.numpy.asarray, found.batch))  # on the CPU, JAX takes the memory as it lies
            assert jax.tree.structure(found.batch) == jax.tree.structure(expected[number].batch)
            for left, right in zip(jax.tree.leaves(found.batch), jax.tree.leaves(expected[number].batch), strict=True):
                assert left.dtype == right.dtype and left.shape == right.shape
                np.testing.assert_array_equal(left, right)
            image = found.batch.observation.images["a"]
            assert image.ctypes.data % 64 == 0 and not image.flags.owndata
        # Of 30 batches: 3 under way, 2 in this loop's hands, 4 kept, 2 still named by a thread that has just delivered.
        assert loader._pool.num_buffers <= 3 + 2 + 4 + 2
        pids = loader._pool.pids
    assert not any(map(is_alive, pids))
    for number, batch in enumerate(kept):  # still there after the pool, and after its memory went round
        np.testing.assert_array_equal(batch.actions, expected[number].batch.actions)
        np.testing.assert_array_equal(batch.observation.images["a"], expected[number].batch.observation.images["a"])


def test_threads_that_need_new_memory_at_once_get_different_memory(monkeypatch):
    create = os.memfd_create

    def create_slowly(*args):
        time.sleep(0.05)
        return create(*args)

    pool = ProcessPool(batch_of, 2)
    try:
        monkeypatch.setattr(os, "memfd_create", create_slowly)
        kept = []
        for start in range(0, 60, 6):  # both workers come to know all the memory
            futures = [pool.submit(np.arange(start + more, start + more + 3)) for more in (0, 3)]
            batches = [future.result(timeout=60) for future in futures]
            for more, batch in zip((0, 3), batches, strict=True):
                np.testing.assert_array_equal(batch.actions[:, 0], np.arange(start + more, start + more + 3))
            kept += batches[: start == 0]
        np.testing.assert_array_equal(kept[0].actions[:, 0], np.arange(3))
    finally:
        pool.close()


def test_workers_have_no_gpu_and_their_own_cores(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_no_such_flag=true")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    pool = ProcessPool(look_around, 2)
    try:
        seen = [pool.submit(np.arange(1)).result(timeout=60) for _ in range(2)]
        assert {entry["pid"] for entry in seen} <= set(pool.pids)
    finally:
        pool.close()
    for entry in seen:
        # XLA's flags are conftest's, which comes with this module's functions; not the trainer's.
        expected = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": COMPILING["XLA_FLAGS"]}
        assert entry["environment"] == expected
        assert entry["gpu"] == [] and set(entry["devices"]) == {"cpu"}
        assert entry["cores"] == worker_cores()


def test_cores_and_environment():
    assert worker_cores([0, 1]) == [1]
    assert worker_cores([3]) == [3]
    assert worker_cores(range(16)) == list(range(2, 16))
    environment = worker_environment({"XLA_FLAGS": "x", "HOME": "/h"})
    assert environment["HOME"] == "/h" and "XLA_FLAGS" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and str(REPO) in environment["PYTHONPATH"].split(":")


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        (1, FrameError, "dataset set, episode 3, frame 4, camera top: it is damaged"),
        (2, KeyError, "no such thing"),
        (3, RuntimeError, "Unheard: of"),
        (4, WorkerDied, r"SIGKILL\) while reading episode 8 frame 15\..*dmesg"),
        (5, FileNotFoundError, "gone"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_told(row, kind, message):
    pool = ProcessPool(misbehave, 1)
    try:
        with pytest.raises(kind, match=message) as caught:
            pool.submit(np.array([row])).result(timeout=60)
        if kind not in (FrameError, WorkerDied):
            assert "in misbehave" in caught.value.__notes__[0]  # the worker's own traceback
    finally:
        pool.close()


def test_a_dead_worker_is_told_with_the_batch():
    rows = np.array([4, 0])
    with Loader(
        misbehave, SampleOrder(2, 0), 2, num_workers=1, start_pool=ProcessPool, describe=lambda ids: "episode 7"
    ) as loader:
        loader._order.rows = lambda *arguments: rows
        with pytest.raises(WorkerDied, match=r"samples 0 to 1 \(episode 7\)"):
            next(loader)


def test_what_cannot_be_loaded_there_is_told():
    pool = ProcessPool(Unloadable(), 1)
    try:
        with pytest.raises(ZeroDivisionError):
            pool.submit(np.arange(1)).result(timeout=60)
    finally:
        pool.close()


def test_closing_does_not_wait_for_a_worker_that_hangs(caplog):
    loader = Loader(misbehave, SampleOrder(1, 0), 1, num_workers=1, start_pool=ProcessPool, patience_s=0.2)
    loader._order.rows = lambda *arguments: np.array([6])
    pool = loader._pool = ProcessPool(misbehave, 1)
    future = pool.submit(np.array([6]))
    with pytest.raises(TimeoutError):
        future.result(timeout=0.5)
    start = time.perf_counter()
    loader.close()
    assert time.perf_counter() - start < 5 and not any(map(is_alive, pool.pids))
    with pytest.raises(UserError):
        future.result(timeout=1)


def test_closing_does_not_wait_for_a_worker_that_the_kernel_holds(monkeypatch):
    """In a call to storage that does not return not even SIGKILL ends a process."""
    monkeypatch.setattr("openpi_accel.data.worker_pool._END_S", 0.5)
    pool = ProcessPool(misbehave, 1)
    future = pool.submit(np.array([6]))
    with pytest.raises(TimeoutError):
        future.result(timeout=0.5)
    popen = pool._processes[0].popen
    popen.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, popen.pid, os.WSTOPPED)
    with monkeypatch.context() as held:
        held.setattr(popen, "kill", lambda: None)
        start = time.perf_counter()
        pool.close()
        assert time.perf_counter() - start < 5 and is_alive(popen.pid)
    popen.kill()
    popen.wait(10)
    with pytest.raises(WorkerDied, match="was ended"):
        future.result(timeout=1)


def test_a_slow_batch_is_named(caplog):
    def slow(rows):
        time.sleep(0.3)
        return rows

    with Loader(slow, SampleOrder(4, 0), 2, num_workers=1, patience_s=0.1, describe=lambda ids: "episode 5") as loader:
        next(loader)
    assert any("waiting for" in text and "samples 0 to 1 (episode 5)" in text for text in caplog.messages)


PARENT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits that it is ignored
import numpy as np
from openpi_accel.data.loader import Loader
from openpi_accel.data.order import SampleOrder
from openpi_accel.data.worker_pool import ProcessPool
from tests.pool_jobs import echo, misbehave
busy = sys.argv[1] == "busy"
loader = Loader(misbehave if busy else echo, SampleOrder(8, 0), 2, num_workers=2, start_pool=ProcessPool)
if busy:
    loader._order.rows = lambda *arguments: np.array([6])
with loader:
    if busy:
        loader._pool = ProcessPool(misbehave, 2)
        for _ in range(2):
            loader._pool.submit(np.array([6]))
        time.sleep(1.5)
    else:
        next(loader)
    print(*loader._pool.pids, flush=True)
    if sys.argv[1] == "end":
        sys.exit(0)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "sent"),
    [("end", None), ("idle", signal.SIGINT), ("idle", signal.SIGKILL), ("busy", signal.SIGKILL)],
)
def test_nothing_is_left(how, sent):
    before = set(os.listdir("/dev/shm"))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        if sent is not None:
            assert all(map(is_alive, pids))
            parent.send_signal(sent)
        parent.wait(timeout=30)
        end = time.monotonic() + 20
        while any(map(is_alive, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(is_alive, pids))
        assert set(os.listdir("/dev/shm")) <= before
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
