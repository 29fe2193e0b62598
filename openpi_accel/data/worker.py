"""A data worker's process: python -m openpi_accel.data.worker SOCKET NOTE CORES. Started by `worker_pool`.

Speaks over a socket that it inherits: first what to run, then a job at a time. A batch's arrays go into shared memory
without being pickled; the answer tells where they lie.
"""

import contextlib
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

ALIGNMENT = 64  # JAX takes arrays on the CPU as they lie only where they are aligned so
_HEADER = struct.Struct("<Q")


def send(channel: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    """Sends one pickled message, and open files with it."""
    data = pickle.dumps(message, protocol=5)
    socket.send_fds(channel, [_HEADER.pack(len(data))], list(files))
    channel.sendall(data)


def receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """The next message and the files that came with it.

    Raises:
        EOFError: the other side is gone.
    """
    head, files, _, _ = socket.recv_fds(channel, _HEADER.size, 1)
    head += _exactly(channel, _HEADER.size - len(head)) if head else b""
    if not head:
        raise EOFError
    return pickle.loads(_exactly(channel, _HEADER.unpack(head)[0])), files


def _exactly(channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = channel.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data


class SharedMemory:
    """Memory without a name, so that nothing can be left behind: it is gone with the last process that has it open."""

    def __init__(self, file: int) -> None:
        self._file, self._map = file, None if os.fstat(file).st_size == 0 else mmap.mmap(file, 0)

    def at_least(self, size: int) -> mmap.mmap:
        """The memory, made larger if need be."""
        if self._map is None or len(self._map) < size:
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, 0)
        return self._map


def _answer(load: Any, rows: Any, memory: SharedMemory) -> tuple[str, bytes, list[tuple[int, int]]]:
    buffers: list[pickle.PickleBuffer] = []
    meta = pickle.dumps(load(rows), protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    places, end = [], 0
    for part in raw:
        places.append((end, part.nbytes))
        end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    if end:
        target = memoryview(memory.at_least(end))
        for (start, size), part in zip(places, raw, strict=True):
            target[start : start + size] = part
    return "batch", meta, places


def _failure(error: BaseException) -> tuple[str, BaseException, str]:
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception type that does not travel
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return "error", error, trace


def _leave_with(channel: socket.socket) -> None:
    """Ends this process as soon as the other side is gone, whatever it is doing."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


def main(socket_number: int, note_number: int, cores: list[int]) -> None:
    """Serves until the other side closes the socket."""
    # Ctrl-C and a platform's SIGTERM are the trainer's to answer: it may still want its next batch.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if cores:
        os.sched_setaffinity(0, cores)
    from openpi_accel.data import now_reading

    channel = socket.socket(fileno=socket_number)
    threading.Thread(target=_leave_with, args=(channel,), daemon=True).start()
    now_reading.share(SharedMemory(note_number).at_least(now_reading.SIZE))
    memories: dict[int, SharedMemory] = {}
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            load = pickle.loads(receive(channel)[0])
            send(channel, ("ready",))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:
            send(channel, _failure(error))
            return
        while True:
            (number, rows), files = receive(channel)
            for file in files:
                memories[number] = SharedMemory(file)
            answer: Any
            try:
                answer = _answer(load, rows, memories[number])
            except BaseException as error:
                answer = _failure(error)
            now_reading.note(-1, -1)
            send(channel, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [int(core) for core in sys.argv[3].split(",") if core])
