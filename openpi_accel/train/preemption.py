"""SIGTERM before the platform's kill: which step ends the run, and is there still time to save it?"""

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from openpi_accel.parallel.exchange import from_first

# The process ends by itself so long before the grace is over, or a quarter of the grace where that is shorter.
_EARLY_S = 4.0


class Preemption:
    """Whether the run was asked to end early, by which signal, and how much time is left.

    Args:
        grace_s: between SIGTERM and the platform's kill.
        exit_code: after SIGTERM.
    """

    def __init__(
        self,
        grace_s: float = math.inf,
        exit_code: int = 128 + signal.SIGTERM,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.grace_s = grace_s
        self._exit_code, self._now = exit_code, now
        self.signal: int | None = None
        self._noticed_s: float | None = None

    @property
    def exit_code(self) -> int:
        """Of a run that the signal has stopped."""
        return self._exit_code if self.signal in (None, signal.SIGTERM) else 128 + self.signal

    def note(self, number: int) -> None:
        """The signal has come to this process. The first one counts, but for SIGTERM, after which a kill will come."""
        self.signal = number if number == signal.SIGTERM else self.signal or number
        if number == signal.SIGTERM:
            self.notice()

    def notice(self) -> None:
        """SIGTERM has come to one of the processes: the grace runs."""
        if self._noticed_s is None:
            self._noticed_s = self._now()

    @property
    def noticed(self) -> bool:
        """Whether the grace runs."""
        return self._noticed_s is not None

    def left_s(self) -> float:
        """Seconds until this process must have ended."""
        if self._noticed_s is None:
            return math.inf
        return self._noticed_s + self.grace_s - min(_EARLY_S, self.grace_s / 4) - self._now()

    def asked(self, index: int) -> bool:
        """To be called by every process after every step; all of them get the same answer after the same step."""
        # JAX itself watches for SIGTERM where there are several processes, and has them agree on a step.
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(index):
            self.note(signal.SIGTERM)
        return self.signal is not None

    def too_late_to_save(self, predicted_s: float) -> str:
        """Why no save is to be begun, empty where it fits; all processes get rank 0's answer, so all must ask."""
        if self.signal != signal.SIGTERM:
            return ""

        def judge() -> str:
            left_s = self.left_s()
            if predicted_s <= left_s:
                return json.dumps("")
            return json.dumps(
                f"a save takes about {predicted_s:.0f} s, and {max(0.0, left_s):.0f} s are left of --grace-s "
                f"{self.grace_s:g}, so none was begun"
            )

        return str(json.loads(from_first(judge)))


@contextlib.contextmanager
def stop_signals(preemption: Preemption) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C are noted, to be obeyed after the step; a second Ctrl-C interrupts at once.

    With several processes SIGTERM to any one of them stops all after the same step. Ctrl-C keeps its usual effect.
    """
    if threading.current_thread() is not threading.main_thread() or jax.process_count() > 1:
        yield
        return

    def note(number: int, frame: Any) -> None:
        if preemption.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        preemption.note(number)

    old = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
