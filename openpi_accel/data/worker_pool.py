"""Who makes the batches: threads of this process, or processes of their own.

Processes are started by exec, not by fork, with their environment settled before (`worker_env`); batches come back in
shared memory that has no name and is used again once nothing refers to the batch any more.
"""

import concurrent.futures
import contextlib
import mmap
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from openpi_accel.data import now_reading
from openpi_accel.data.worker import receive, send
from openpi_accel.data.worker_env import worker_cores, worker_environment
from openpi_accel.errors import UserError

# A process that was killed is gone at once, unless the kernel holds it.
_END_S = 5.0

type LoadBatch[T] = Callable[[np.ndarray], T]


class WorkerPool[T](Protocol):
    """Makes batches, several at once."""

    def submit(self, rows: np.ndarray) -> concurrent.futures.Future[T]:
        """Begins a batch of these rows."""

    def close(self) -> None:
        """Gives up what is under way and waits until no worker is left."""


class WorkerDied(UserError):
    """A worker's process has ended by itself."""


class ThreadPool[T]:
    """Threads. Decoding and resizing run outside Python's global lock; the rest does not."""

    def __init__(self, load_batch: LoadBatch[T], num_workers: int) -> None:
        self._load_batch = load_batch
        self._executor = concurrent.futures.ThreadPoolExecutor(num_workers, "data-worker")

    def submit(self, rows: np.ndarray) -> concurrent.futures.Future[T]:
        """See WorkerPool."""
        return self._executor.submit(self._load_batch, rows)

    def close(self) -> None:
        """See WorkerPool."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class ProcessPool[T]:
    """Processes without GPU, on cores away from the trainer's own.

    The arrays of a batch lie in shared memory. They may be kept as long as one likes: the memory is used again when the
    last of them is gone.
    """

    def __init__(self, load_batch: LoadBatch[T], num_workers: int) -> None:
        """Starts the processes.

        Args:
            load_batch: makes a batch of rows; must pickle. The batch is any picklable tree of numpy arrays.
            num_workers: at least 1.
        """
        self._payload = pickle.dumps(load_batch, protocol=5)
        self._buffers: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._num_buffers = 0
        self._counting = threading.Lock()
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._processes = [_Process(number) for number in range(num_workers)]
        for process in self._processes:
            self._idle.put(process)
        # One thread for each process: it waits for the answer, outside Python's global lock.
        self._executor = concurrent.futures.ThreadPoolExecutor(num_workers, "data-worker")

    @property
    def pids(self) -> list[int]:
        """Of the workers."""
        return [process.popen.pid for process in self._processes]

    @property
    def num_buffers(self) -> int:
        """Batches' worth of shared memory that exist."""
        return self._num_buffers

    def submit(self, rows: np.ndarray) -> concurrent.futures.Future[T]:
        """See WorkerPool."""
        return self._executor.submit(self._load, rows)

    def close(self) -> None:
        """See WorkerPool. Workers hold nothing that would have to be saved, so they are killed.

        One inside a call to storage that does not return ends only with that call, and is not waited for.
        """
        for process in self._processes:
            process.give_up()
        self._executor.shutdown(wait=True, cancel_futures=True)
        deadline_s = time.monotonic() + _END_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline_s - time.monotonic()))
            process.channel.close()

    def _load(self, rows: np.ndarray) -> T:
        process = self._idle.get()
        try:
            try:
                buffer = self._buffers.get_nowait()
            except queue.Empty:
                with self._counting:  # workers know memory by its number: two of one number would mix batches up
                    buffer = _Buffer(self._num_buffers)
                    self._num_buffers += 1
            try:
                meta, places = process.load(self._payload, buffer, rows)
            except BaseException:
                self._buffers.put(buffer)
                raise
            return buffer.hand_out(meta, places, self._buffers)
        finally:
            self._idle.put(process)


class _Buffer:
    """Shared memory of one batch."""

    def __init__(self, number: int) -> None:
        self.number, self.file = number, os.memfd_create(f"batch-{number}", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None
        weakref.finalize(self, os.close, self.file)

    def hand_out(self, meta: bytes, places: list[tuple[int, int]], free: "queue.SimpleQueue[_Buffer]") -> Any:
        """The batch, its arrays lying here; when the last of them is gone, this buffer is put into `free`."""
        end = max((start + size for start, size in places), default=0)
        if end and (self._map is None or len(self._map) < end):
            self._map = mmap.mmap(self.file, 0)
        whole = np.frombuffer(self._map, np.uint8) if self._map is not None else np.zeros(0, np.uint8)
        weakref.finalize(whole, free.put, self).atexit = False  # numpy's views all keep `whole` itself alive
        return pickle.loads(meta, buffers=[whole[start : start + size] for start, size in places])


class _Process:
    """One worker."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._note = os.memfd_create(f"data-worker-{number}", os.MFD_CLOEXEC)
        os.ftruncate(self._note, now_reading.SIZE)
        self._note_map = mmap.mmap(self._note, now_reading.SIZE)
        self.channel, theirs = socket.socketpair()
        cores = ",".join(map(str, worker_cores()))
        with theirs:
            inherited = theirs.fileno(), self._note
            self.popen = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "openpi_accel.data.worker", *map(str, inherited), cores],
                pass_fds=inherited,
                env=worker_environment(),
                stdin=subprocess.DEVNULL,
                process_group=0,  # a Ctrl-C on the terminal reaches the trainer alone, which closes the pool
            )
        os.close(self._note)
        self._ready = self._given_up = False
        self._known: set[int] = set()

    def load(self, payload: bytes, buffer: _Buffer, rows: np.ndarray) -> tuple[bytes, list[tuple[int, int]]]:
        """Has a batch made; where it lies in `buffer`.

        Raises:
            WorkerDied: the process ended; whatever loading raised there.
        """
        if not self._ready:
            self._ask(payload)
            self._ready = True
        files = () if buffer.number in self._known else (buffer.file,)
        meta, places = self._ask((buffer.number, rows), files)
        self._known.add(buffer.number)
        return meta, places

    def give_up(self) -> None:
        """Kills it, and waits for its answer no longer."""
        self._given_up = True
        self.popen.kill()
        with contextlib.suppress(OSError):  # closed from there already
            self.channel.shutdown(socket.SHUT_RDWR)

    def _ask(self, message: Any, files: tuple[int, ...] = ()) -> Any:
        try:
            send(self.channel, message, files)
            kind, *content = receive(self.channel)[0]
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise self._death() from error
        if kind == "error":
            raised, trace = content
            if not isinstance(raised, UserError):
                raised.add_note(f"in data worker {self.number}:\n{trace}")
            raise raised
        return content

    def _death(self) -> WorkerDied:
        if self._given_up:
            return WorkerDied(f"data worker {self.number} was ended")
        try:
            code = self.popen.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            code = -signal.SIGKILL
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        hint = (
            " SIGKILL is usually the kernel's answer to a full memory (see dmesg): lower --num-workers or "
            "--data.prefetch-batches."
            if code == -signal.SIGKILL
            else ""
        )
        reading = now_reading.noted(self._note_map)
        where = "" if reading is None else f" while reading episode {reading[0]} frame {reading[1]}"
        return WorkerDied(f"data worker {self.number} ended by itself ({name}){where}.{hint}")
