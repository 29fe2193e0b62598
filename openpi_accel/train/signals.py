"""Which signals have come, known at once also while the main thread is in C code, where Python's handlers wait."""

import contextlib
import signal
import socket
import threading
from collections.abc import Set
from typing import Any


class Signals:
    """Listens from `start` to `stop`; only the main thread can, in others nothing is heard."""

    def __init__(self) -> None:
        self._come: set[int] = set()
        self._ears: tuple[socket.socket, socket.socket] | None = None
        self._before: tuple[int, Any] | None = None

    def start(self, *, hold_sigterm: bool) -> None:
        """From here on.

        Args:
            hold_sigterm: it ends this process no longer. False where JAX has a handler of its own.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._ears = socket.socketpair()
        for ear in self._ears:
            ear.setblocking(False)
        # Python's handler in C writes the signal's number here, whatever the main thread does.
        fd = signal.set_wakeup_fd(self._ears[1].fileno(), warn_on_full_buffer=False)
        self._before = (fd, signal.signal(signal.SIGTERM, lambda *_: None) if hold_sigterm else None)

    def stop(self) -> None:
        """As before `start`."""
        if self._ears is None or self._before is None:
            return
        fd, handler = self._before
        signal.set_wakeup_fd(fd)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        self.come()
        for ear in self._ears:
            ear.close()
        self._ears = None

    def come(self) -> Set[int]:
        """The signals so far; any thread may ask."""
        ears = self._ears  # another thread may be in `stop`
        if ears is not None:
            with contextlib.suppress(OSError):  # nothing new, or closed in the meantime
                self._come |= set(ears[0].recv(4096))
        return self._come
