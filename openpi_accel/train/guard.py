"""One thread beside the training: hears of other processes that end, watches slow steps and the grace of a SIGTERM."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

import jax

from openpi_accel.errors import OtherProcessEnded, UserError, is_broken_collective, is_out_of_memory, told
from openpi_accel.parallel.exchange import name_ranks
from openpi_accel.parallel.peers import Peers
from openpi_accel.train.preemption import Preemption
from openpi_accel.train.signals import Signals
from openpi_accel.train.watchdog import COMPILE, END, SILENT_S, START, StepClock, complaint, is_silent, limit_s

_TICK_S = 1.0
# A process that hears of another's end may be about to end by itself, for the same reason and in its own words.
_OWN_WORDS_S = 4.0
# A rank that was killed is named after SILENT_S; its end may have come a little after the error it causes here.
_CULPRIT_S = SILENT_S + 4.0
# As when JAX itself ends a process that misses another one: an abort.
MISSED_EXIT_CODE = 134
# Words of its own that a process has found before an abort are out after this time.
_PRINT_S = 1.0


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the log may lie on a full disk
        print(text, file=sys.stderr, flush=True)


def _is_of_jax(error: BaseException) -> bool:
    """Whether it may come from another process that has gone: a collective fails then."""
    from_jax = isinstance(error, jax.errors.JaxRuntimeError) or is_broken_collective(error)
    return from_jax and not isinstance(error, UserError) and not is_out_of_memory(error)


class Guard:
    """Holds for the whole of a run, as a context; what it raises or lets through must end the process.

    Attributes:
        clock: to be told what the run does.
        preemption: SIGTERM and its grace.
        committed: tells the last complete checkpoint; None as long as the run's folder has not been looked at.
        save_problem: tells why a save has failed in this process.
    """

    def __init__(
        self, preemption: Preemption | None = None, peers: Peers | None = None, say: Callable[[str], None] = _say
    ) -> None:
        self.clock, self.preemption = StepClock(), preemption or Preemption()
        self.committed: Callable[[], int | None] | None = None
        self.save_problem: Callable[[], UserError | None] = lambda: None
        self._peers, self._say = peers or Peers(), say
        self._signals = Signals()
        self._failed_s: float | None = None
        self._interrupted_s: float | None = None
        self._reached_s = time.monotonic()
        self._silent: set[int] = set()
        self._told_by_others: list[tuple[str, int]] = []
        self._own_exit_code: int | None = None
        self._own_words: str | None = None
        self._last_words = self._peers.last_words(self._speak_last)
        self._told_s, self._own_trouble = 0.0, ""
        self._ending, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)

    def __enter__(self) -> Self:
        self._signals.start(hold_sigterm=self._peers.count == 1)
        if self._peers.count > 1:
            self._peers.post(self.clock.seat())  # from here on process 0 does not end before it
            self._last_words.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._signals.stop()
        several = self._peers.count > 1
        if several and isinstance(error, Exception | KeyboardInterrupt):
            self._ending.set()  # from here on this process ends in its own words; it goes on to be heard of
            try:
                self._tell(error)
            except jax.errors.JaxRuntimeError:  # process 0 is gone, and nobody can be told
                if _is_of_jax(error):  # for that very reason, most likely
                    self._own_exit_code = MISSED_EXIT_CODE
                    self._own_words = f"{self._first_is_gone() or 'rank 0 ended without a word'}; {self.kept()}"
                    raise OtherProcessEnded(self._own_words, MISSED_EXIT_CODE) from None
            self._own_exit_code = told(error)[1]
            return
        if several:
            self.clock.begin(END)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._peers.post(self.clock.seat())  # its silence means nothing from now on
                # JAX's own wait for the others is short, and one may have gigabytes to delete or a log to send.
                while error is None and self._thread.is_alive() and self._others_go_on():
                    time.sleep(_TICK_S / 5)
        self._over.set()
        self._thread.join()
        if several:
            self._last_words.stop()

    def _tell(self, error: BaseException) -> None:
        """Says to the others that this process ends, and why; raises OtherProcessEnded for an error not its own."""
        found = self._culprit(error)
        if found is not None:
            self._own_exit_code = found.exit_code
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has gone since
                self._peers.tell_failure(f"error: {found}", found.exit_code)
            raise found from None
        message, exit_code = told(error)
        text = (message or f"{type(error).__name__}: {error}").removeprefix("error: ")
        self._peers.tell_failure(f"error: rank {self._peers.rank}: {text}", exit_code)

    def _culprit(self, error: BaseException) -> OtherProcessEnded | None:
        """The end of another process that may have caused this error: a collective fails where one of them is gone."""
        if not _is_of_jax(error):
            return None
        deadline_s = time.monotonic() + _CULPRIT_S
        while time.monotonic() < deadline_s:
            for rank, (text, exit_code) in self._peers.failures().items():
                if rank != self._peers.rank:
                    return OtherProcessEnded(self._with_kept(text.removeprefix("error: ")), exit_code)
            gone = self._silent_ranks()
            if gone:
                return OtherProcessEnded(
                    f"{name_ranks(gone)} ended without a word: nothing was heard for {SILENT_S:.0f} s. The reason is "
                    f"in the log there, or the platform killed it; {self.kept()}",
                    MISSED_EXIT_CODE,
                )
            time.sleep(_TICK_S / 2)
        return None

    def kept(self) -> str:
        """What a resumed run would go on from, as a sentence."""
        if self.committed is None:
            return "nothing was trained, and checkpoints from before stay as they are"
        step = self.committed()
        if step is None:
            return "this run has no checkpoint yet"
        return f"checkpoint {step} is complete: go on with --resume (launchers: RESUME=1)"

    def _with_kept(self, text: str) -> str:
        return text if "--resume" in text else f"{text.rstrip('.')}; {self.kept()}"

    def _silent_ranks(self) -> list[int]:
        return [rank for rank, seat in self._peers.seats().items() if is_silent(seat)]

    def _others_go_on(self) -> bool:
        return any(seat.phase != END and not is_silent(seat) for seat in self._peers.seats().values())

    def _watch(self) -> None:
        while not self._over.wait(_TICK_S):
            try:
                if self._peers.count > 1:
                    self._peers.post(self.clock.seat())
                    self._reached_s = time.monotonic()
                    self._hear()
                if not self._ending.is_set():
                    self._look_at_signals()
                    self._look_at_grace()
                    self._look_at_step()
            except jax.errors.JaxRuntimeError:
                continue  # process 0 cannot be asked now; if it is gone, JAX aborts this one (`_speak_last`)
            except Exception as error:  # a guard that ended in silence would leave the others waiting
                if (text := f"warning: the watch over this run: {type(error).__name__}: {error}") != self._own_trouble:
                    self._own_trouble = text
                    self._say(text)

    def _hear(self) -> None:
        """Another process that ends takes this one along; one that falls silent is remembered, and named on rank 0."""
        if self._ending.is_set():
            return
        others = [why for rank, why in self._peers.failures().items() if rank != self._peers.rank]
        self._told_by_others = others
        problem = self.save_problem()
        if others or problem is not None:
            self._failed_s = self._failed_s or time.monotonic()
            if time.monotonic() - self._failed_s > _OWN_WORDS_S:
                if problem is not None:
                    self._peers.tell_failure(f"error: rank {self._peers.rank}: {problem}", told(problem)[1])
                    self._leave(f"error: {problem}", told(problem)[1])
                text, exit_code = others[0]
                self._leave(self._with_kept(text), exit_code)
        silent = set(self._silent_ranks())
        new = sorted(silent - self._silent)
        if new and self._peers.rank == 0:
            self._say(
                f"warning: nothing was heard of {name_ranks(new)} for {SILENT_S:.0f} s. If the process is gone, "
                f"all others will end; {self.kept()}"
            )
        self._silent = silent

    def _speak_last(self) -> int:
        """C++ code aborts this process, which must not ask JAX for anything any more; gives the exit code."""
        if self._own_exit_code is not None:
            time.sleep(_PRINT_S)
            if self._own_words is not None:  # once more: the lines of what aborts came after
                self._say(f"error: {self._own_words}")
            return self._own_exit_code
        if self._told_by_others:
            text, exit_code = self._told_by_others[0]
            self._say(self._with_kept(text))
            return exit_code
        if self._silent:  # before rank 0 is asked, which the same end may have taken along a moment ago
            why = f"{name_ranks(sorted(self._silent))} ended without a word, and JAX ends the others; see the log there"
        elif self._peers.rank != 0 and (gone := self._first_is_gone()):
            why = gone
        elif self._peers.rank != 0 and time.monotonic() - self._reached_s > SILENT_S:
            quiet_s = time.monotonic() - self._reached_s
            why = f"rank 0 stands still: nothing was heard of it for {quiet_s:.0f} s. The reason is on its machine"
        else:
            why = f"rank {self._peers.rank} was aborted by JAX or another library; its own lines above say why"
        self._say(f"error: {why}; {self.kept()}")
        return MISSED_EXIT_CODE

    def _first_is_gone(self) -> str:
        """How rank 0's end shows; empty where it does not."""
        problem = self._peers.first_is_gone()
        return (
            problem
            and f"rank 0 ended without a word: {problem}. The reason is in the log there, or the platform killed it"
        )

    def _look_at_signals(self) -> None:
        """Before training, what the main thread does may take minutes in C code and has nothing to save."""
        come = self._signals.come()
        if signal.SIGTERM in come:
            self.preemption.note(signal.SIGTERM)
        if signal.SIGINT in come and self.clock.seat().phase in (START, COMPILE):
            self._interrupted_s = self._interrupted_s or time.monotonic()
            if time.monotonic() - self._interrupted_s > _OWN_WORDS_S:
                self._peers.tell_failure(f"error: rank {self._peers.rank}: interrupted", 128 + signal.SIGINT)
                self._leave(f"interrupted; {self.kept()}", 128 + signal.SIGINT)

    def _look_at_grace(self) -> None:
        if self._peers.preemption_noticed():
            self.preemption.notice()
        if not self.preemption.noticed:
            return
        if self.clock.seat().phase in (START, COMPILE):
            why = "SIGTERM before training began, so there is nothing to save"
        elif self.preemption.left_s() <= 0:
            phase = self.clock.seat().phase
            why = f"SIGTERM: --grace-s {self.preemption.grace_s:g} is nearly over, and {phase} is not done"
        else:
            return
        self._peers.tell_failure(why, self.preemption.exit_code)
        self._leave(f"{why}; {self.kept()}", self.preemption.exit_code)

    def _look_at_step(self) -> None:
        elapsed_s, median_s = self.clock.elapsed_s(), self.clock.median_s()
        own = self.clock.seat()
        if elapsed_s <= limit_s(own.phase, median_s):
            self._told_s = 0.0
        elif elapsed_s > 2 * self._told_s:  # each time twice as late
            text = complaint(self._peers.rank, own, self._peers.seats(), elapsed_s, median_s)
            if text:
                self._told_s = elapsed_s
                self._say(text)

    def _leave(self, text: str, exit_code: int) -> NoReturn:
        self._say(text)
        self._peers.leave(exit_code, linger_s=3.0)
