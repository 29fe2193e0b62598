"""The words of a process that C++ code aborts, as JAX does at once where process 0, which keeps its store, is gone.

An abort ends the process before any Python can run. So SIGABRT is met by the C library's own `sleep`, which takes the
signal's number for seconds: six, in which a thread that looks for it says why and ends the process. Nothing of Python
runs in the handler, which is safe in any state of the program; where the thread cannot speak, the abort goes on.
"""

import contextlib
import ctypes
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable

_LOOK_S = 0.25
_SIGABRT_CAUGHT = 1 << (signal.SIGABRT - 1)


class LastWords:
    """Holds from `start` to `stop`; does nothing outside Linux.

    Args:
        speak: says why the process ends; gives its exit code. It runs in a thread of its own, should take two seconds
            at the most, and must ask nothing of the code that aborts.
    """

    def __init__(self, speak: Callable[[], int]) -> None:
        self._speak, self._over = speak, threading.Event()
        self._before: int | None = None
        self._thread = threading.Thread(target=self._watch, name="last words", daemon=True)

    def start(self) -> None:
        """From here on an abort is told."""
        if sys.platform == "linux":
            # System V's way: the handler is gone once it has been called, which is what the thread looks for.
            self._before = _handle(ctypes.cast(ctypes.CDLL(None).sleep, ctypes.c_void_p).value)
            self._thread.start()

    def stop(self) -> None:
        """As before `start`."""
        if self._thread.is_alive():
            self._over.set()
            self._thread.join()
            _handle(self._before)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            if not _is_handled():
                os._exit(self._speak())


def _handle(handler: int | None) -> int | None:
    """Sets the address of SIGABRT's handler (None or 0 is the default); gives that of the one before."""
    libc = ctypes.CDLL(None)
    libc.sysv_signal.argtypes, libc.sysv_signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before: int | None = libc.sysv_signal(signal.SIGABRT, handler)
    return before


def _is_handled() -> bool:
    with contextlib.suppress(OSError):  # no file to open is left, say
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) & _SIGABRT_CAUGHT)
    return True
