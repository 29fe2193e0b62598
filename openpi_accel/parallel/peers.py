"""What processes tell each other in the background of a run: how far they are, and that one of them ends.

It goes through the key-value store that JAX keeps on process 0 for its own start, so no further port is needed. A call
is a round trip to process 0 (below a millisecond on one machine), made from a thread beside the training.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

# JAX has no public way to its store; Orbax reaches for it in the same manner.
from jax._src import distributed

from openpi_accel.parallel.last_words import LastWords

# So long process 0, which keeps the store, waits for the others to hear why the run ends; for one that says nothing
# in the meantime, though all speak every second, only _DEAF_S.
LINGER_S = 10.0
_DEAF_S = 3.0
# Process 0's port answers at once, or its machine is gone.
_ANSWER_S = 1.5
_SEATS, _FAILURES, _LEFT = "openpi_accel/seats", "openpi_accel/failures", "openpi_accel/left"
# JAX's own: set by the process that got SIGTERM (tests/distributed/test_faults.py would miss it).
_PREEMPTION_NOTICE = "RECEIVED_PREEMPTION_NOTICE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """What a process last said about itself.

    Attributes:
        step: the one it is in.
        phase: what it does.
        phase_s: for how long, in seconds, when it said so.
        silent_s: how long nothing new was heard of it, in seconds, as far as this process has listened.
    """

    step: int
    phase: str
    phase_s: float
    silent_s: float = 0.0


def _addresses_of(coordinator: str | None) -> list[tuple[str, int]]:
    """The numbers behind host:port; to look them up when a machine has gone could take longer than there is time."""
    host, _, port = (coordinator or "").rpartition(":")
    with contextlib.suppress(OSError):
        if host:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            return [(str(address[0]), int(port)) for *_, address in found]
    return []


class Peers:
    """The processes of this run; where there is one, nothing is told and nobody answers."""

    def __init__(self, client: Any = None) -> None:
        """Args: client: JAX's, or a stand-in with its key_value_ methods."""
        self._client = client if client is not None else distributed.global_state.client
        self.rank: int = distributed.global_state.process_id
        self.count: int = distributed.global_state.num_processes if self._client is not None else 1
        self._first: list[tuple[str, int]] = []
        self._posts = 0
        self._heard: dict[int, tuple[int, float]] = {}

    def post(self, seat: Seat) -> None:
        """Says how far this process is."""
        self._posts += 1
        self._set(f"{_SEATS}/{self.rank}", [self._posts, seat.step, seat.phase, seat.phase_s])

    def seats(self) -> dict[int, Seat]:
        """Rank -> what it said last; without those that have said nothing yet."""
        seats, now_s = {}, time.monotonic()
        for rank, (number, step, phase, phase_s) in sorted(self._all(_SEATS).items()):
            if self._heard.get(rank, (None, 0.0))[0] != number:
                self._heard[rank] = (number, now_s)
            silent_s = now_s - self._heard[rank][1]
            seats[rank] = Seat(step=step, phase=phase, phase_s=phase_s, silent_s=silent_s)
        return seats

    def tell_failure(self, text: str, exit_code: int) -> None:
        """Says to all that the run cannot go on: why, as they are to print it, and the exit code for all."""
        self._set(f"{_FAILURES}/{self.rank}", [text, exit_code])

    def failures(self) -> dict[int, tuple[str, int]]:
        """Rank -> text and exit code, as told."""
        return {rank: (text, code) for rank, (text, code) in sorted(self._all(_FAILURES).items())}

    def first_is_gone(self) -> str:
        """Why process 0 is held to be gone, found without JAX; empty where its port answers or its name is unknown."""
        problem = ""
        for address in self._first:
            try:
                socket.create_connection(address, timeout=_ANSWER_S).close()
            except OSError as error:
                problem = str(error) or type(error).__name__
            else:
                return ""
        return problem and f"{distributed.global_state.coordinator_address} does not answer ({problem})"

    def preemption_noticed(self) -> bool:
        """Whether a process of several got SIGTERM (JAX has its own handler there)."""
        if self._client is None:
            return False
        try:
            self._client.key_value_try_get(_PREEMPTION_NOTICE)
        except jax.errors.JaxRuntimeError:  # absent
            return False
        return True

    def last_words(self, speak: Callable[[], int]) -> LastWords:
        """What tells an abort of this process, not yet started."""
        self._first = _addresses_of(distributed.global_state.coordinator_address)  # for `first_is_gone`
        return LastWords(speak)

    def leave(self, exit_code: int, linger_s: float = LINGER_S) -> NoReturn:
        """Ends this process at once: an orderly end would wait for processes that are stuck or gone.

        The store goes with process 0, and JAX then ends the others with a message of its own; so it leaves last.
        """
        with contextlib.suppress(ValueError):  # not the main thread, which alone hears it
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would only make it longer
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the log may lie on a full disk
                stream.flush()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._set(f"{_LEFT}/{self.rank}", [])
            deadline_s = time.monotonic() + linger_s
            while self.rank == 0 and self._others_listen() and time.monotonic() < deadline_s:
                time.sleep(0.1)
            time.sleep(0.2 if self.rank == 0 and self.count > 1 else 0)  # they have said so, and are about to
        os._exit(exit_code)

    def _others_listen(self) -> bool:
        left = self._all(_LEFT)
        return any(rank not in left and seat.silent_s < _DEAF_S for rank, seat in self.seats().items())

    def _set(self, key: str, value: list[Any]) -> None:
        if self._client is not None:
            self._client.key_value_set(key, json.dumps(value), allow_overwrite=True)

    def _all(self, folder: str) -> dict[int, list[Any]]:
        if self._client is None:
            return {}
        return {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in self._client.key_value_dir_get(folder)}


def end_process(exit_code: int) -> None:
    """Ends a process of a run: in order, or, where one of the processes has failed, without waiting for the others."""
    peers = Peers()
    try:
        in_order = not peers.failures()
    except jax.errors.JaxRuntimeError:  # process 0 is gone
        in_order = False
    if not in_order:
        peers.leave(exit_code)
    sys.exit(exit_code)
