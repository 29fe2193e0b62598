"""How long will a save take, and which one is complete? Answered from memory, as the storage itself may stall.

The rule: a save takes as long as the last one of this run took, or, before the first, its bytes at ASSUMED_BYTES_PER_S;
with what is left of one still under way, and SAFETY times that all in all.
"""

import threading
import time
from collections.abc import Callable

# Measured where the program was built: pi0.5's parameters, 13.4 GB, in 38 s (docs/architecture.md).
ASSUMED_BYTES_PER_S = 0.3e9
SAFETY = 1.2


class SaveTimer:
    """Watches the saves of a run; `ended` may come from a writer's thread.

    Attributes:
        committed: loop index of the last complete checkpoint, as far as this process has restored or written one.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.committed: int | None = None
        self._now, self._lock = now, threading.Lock()
        self._under_way: tuple[int, float] | None = None
        self._last_s: float | None = None

    def began(self, loop_index: int) -> None:
        """A save begins, and none is under way."""
        with self._lock:
            self._under_way = (loop_index, self._now())

    def ended(self) -> None:
        """The save under way is complete."""
        with self._lock:
            if self._under_way is not None:
                self.committed, began_s = self._under_way
                self._last_s, self._under_way = self._now() - began_s, None

    def predict_s(self, num_bytes: int) -> float:
        """Seconds until a save that begins now is complete."""
        with self._lock:
            one_s = self._last_s if self._last_s is not None else num_bytes / ASSUMED_BYTES_PER_S
            before_s = 0.0 if self._under_way is None else max(0.0, one_s - (self._now() - self._under_way[1]))
            return SAFETY * (before_s + one_s)
