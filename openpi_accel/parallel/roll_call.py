"""Who is there, before JAX starts: process 0 listens on the coordinator's port until every other has called in.

JAX's own start ends the process when somebody is missing, and does not say who. So the processes first meet here, by
plain TCP on the same port, which JAX's coordinator takes over afterwards.
"""

import contextlib
import json
import math
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from openpi_accel.errors import UserError
from openpi_accel.parallel.platforms import Cluster

# The first pause between two calls, and the longest: processes of one job start within moments of each other.
_FIRST_RETRY_S, _RETRY_S = 0.02, 0.5
# Who has the port is asked, and given so long to answer.
_TWIN_S = 5.0
_LONGEST_LINE = 65536
_LONGEST_TROUBLE = 2000
_MOST_NAMED = 16
# Once somebody is known to be in trouble, how long process 0 stays to tell those who have not come yet.
_GRACE_S = 30


def roll_call(
    cluster: Cluster, timeout_s: float, say: Callable[[str], object], remind_s: float = 30, trouble: str = ""
) -> None:
    """Returns on every process once all of them are there; each says every `remind_s` seconds whom it waits for.

    Args:
        trouble: why this process will not start. It comes all the same, so that the others need not wait for it.

    Raises:
        UserError: not all came within `timeout_s` seconds (with the missing ones), two say that they are the same, they
            do not agree on how many they are, the port cannot be had, or one of them is in trouble.
    """
    if cluster.process_id == 0:
        _Host(cluster, say, remind_s, trouble).gather(timeout_s)
    else:
        _report(cluster, timeout_s, trouble, say, remind_s)


def await_coordinator(cluster: Cluster, timeout_s: float = 5.0) -> None:
    """After the roll call: returns once JAX's coordinator has taken the port over, or after `timeout_s` seconds.

    A process whose first call finds nobody there makes JAX wait for nearly a second before the next one.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((cluster.host, cluster.port), timeout=1) as connection,
        ):
            if connection.getsockname() != connection.getpeername():
                return
        time.sleep(_FIRST_RETRY_S / 2)


class _Host:
    """Process 0's side: one connection for each process that is there and waits."""

    def __init__(self, cluster: Cluster, say: Callable[[str], object], remind_s: float, trouble: str) -> None:
        self._cluster, self._say, self._remind_s = cluster, say, remind_s
        self._present: dict[int, tuple[socket.socket, str]] = {}
        self._selector = selectors.DefaultSelector()
        self._trouble = _cannot_start(0, socket.gethostname(), trouble) if trouble else ""
        self._grace_ends_s = time.monotonic() + _GRACE_S if trouble else math.inf

    def gather(self, timeout_s: float) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            listener = stack.enter_context(_listen(self._cluster))
            self._selector.register(listener, selectors.EVENT_READ, None)
            try:
                self._wait(timeout_s)
            except UserError as error:
                self._answer({"error": str(error)})
                raise
            self._selector.unregister(listener)
            listener.close()  # whom the port answers from now on has reached JAX (`await_coordinator`)
            self._answer({"go": True})

    def _wait(self, timeout_s: float) -> None:
        started_s = time.monotonic()
        remind_at_s = started_s + self._remind_s
        while missing := self._missing():
            now_s = time.monotonic()
            if now_s >= self._grace_ends_s:
                break
            if now_s >= started_s + timeout_s:
                raise UserError(_absent(self._cluster, missing, f"within {timeout_s:g} s", self._arrived()))
            if now_s >= remind_at_s:
                self._say(f"waiting for {_name(self._cluster, missing)} ({now_s - started_s:.0f} s)")
                remind_at_s += self._remind_s
            until_s = min(remind_at_s, started_s + timeout_s, self._grace_ends_s)
            for key, _ in self._selector.select(until_s - now_s):
                if key.data is None:
                    self._accept(key.fileobj)
                else:
                    self._read(key.fileobj, key.data)
        if self._trouble:
            raise UserError(self._trouble)

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._cluster.num_processes) if rank not in self._present]

    def _arrived(self) -> str:
        return ", ".join(f"{rank} ({host})" for rank, (_, host) in sorted(self._present.items())[:_MOST_NAMED])

    def _accept(self, listener: Any) -> None:
        with contextlib.suppress(OSError):  # gone again already
            connection, _ = listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, bytearray())

    def _read(self, connection: Any, received: bytearray) -> None:
        try:
            data = connection.recv(_LONGEST_LINE)
        except OSError:
            data = b""
        received += data
        if not data or len(received) > _LONGEST_LINE:  # a process that died while it waited, or a port scanner
            self._present = {rank: seat for rank, seat in self._present.items() if seat[0] is not connection}
            self._selector.unregister(connection)
            connection.close()
        elif received.endswith(b"\n"):
            self._seat(connection, _decode(received))

    def _seat(self, connection: socket.socket, card: dict[str, Any]) -> None:
        rank, num_processes, host = card.get("rank"), card.get("num_processes"), str(card.get("host"))
        if not isinstance(rank, int) or num_processes is None:
            return  # somebody else's
        if rank == 0:  # only that one is sent away: it may be of another run, with the same port by chance
            text = _two_say(0, socket.gethostname(), host, self._cluster.num_processes)
            self._say(f"warning: {text} The second one has been turned away.")
            _send(connection, {"error": text})
            return
        if num_processes != self._cluster.num_processes:
            raise UserError(
                f"Rank {rank} ({host}) was told of {num_processes} nodes, rank 0 of {self._cluster.num_processes}. "
                f"WORLD_SIZE must be the same on all nodes, for example WORLD_SIZE={self._cluster.num_processes}."
            )
        if rank in self._present and self._present[rank][0] is not connection:
            raise UserError(_two_say(rank, self._present[rank][1], host, num_processes))
        self._present[rank] = (connection, host)
        if (trouble := card.get("trouble")) and not self._trouble:
            self._trouble = _cannot_start(rank, host, str(trouble))
            self._grace_ends_s = time.monotonic() + _GRACE_S  # so that those who come a little later hear of it too

    def _answer(self, message: dict[str, Any]) -> None:
        for connection in self._connections():  # strangers too, who may be the second of a rank
            _send(connection, message)

    def _connections(self) -> list[Any]:
        return [key.fileobj for key in self._selector.get_map().values() if key.data is not None]

    def _close(self) -> None:
        for connection in self._connections():
            connection.close()
        self._selector.close()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # who is gone by now shows when JAX starts
        connection.settimeout(5)
        connection.sendall(json.dumps(message).encode() + b"\n")


def _report(cluster: Cluster, timeout_s: float, trouble: str, say: Callable[[str], object], remind_s: float) -> None:
    """The others' side: connects, says who this is, waits for the answer; anew where process 0 is not there yet."""
    card = _card(cluster, trouble)
    started_s = time.monotonic()
    deadline_s = started_s + timeout_s
    remind_at_s = started_s + remind_s
    # Process 0 speaks when its own time is over; it may have started last.
    patience_s = timeout_s + 10
    failure, pause_s = "no answer", _FIRST_RETRY_S

    def remind() -> None:
        nonlocal remind_at_s
        if (now_s := time.monotonic()) >= remind_at_s:
            say(f"waiting for rank 0 at {cluster.coordinator_address} ({now_s - started_s:.0f} s): {failure}")
            remind_at_s += remind_s

    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with socket.create_connection((cluster.host, cluster.port), timeout=min(left_s, 10)) as connection:
                if connection.getsockname() == connection.getpeername():
                    raise OSError("the port answered to itself")  # TCP allows that where nobody listens
                connection.sendall(json.dumps(card).encode() + b"\n")
                failure = "it has been called, and waits for others"
                line = _line(connection, patience_s, remind)
                answer = _decode(line)
        except OSError as error:
            failure = str(error) or type(error).__name__
        else:
            if "error" in answer:
                raise UserError(answer["error"])
            if "go" in answer:
                return
            failure = (
                f"another program listens there, as it answers {line[:40]!r}: choose another MASTER_PORT on all nodes"
                if line
                else "the connection was closed without an answer"
            )
        remind()
        time.sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
        pause_s = min(2 * pause_s, _RETRY_S)
    raise UserError(_absent(cluster, [0], f"at {cluster.coordinator_address} within {timeout_s:g} s: {failure}"))


def _card(cluster: Cluster, trouble: str) -> dict[str, Any]:
    card = {"rank": cluster.process_id, "num_processes": cluster.num_processes, "host": socket.gethostname()}
    return card | ({"trouble": trouble[:_LONGEST_TROUBLE]} if trouble else {})


def _line(connection: socket.socket, patience_s: float, remind: Callable[[], None] = lambda: None) -> bytes:
    """What comes until a line or the connection ends; raises TimeoutError after `patience_s` seconds."""
    received, deadline_s = bytearray(), time.monotonic() + patience_s
    connection.settimeout(_RETRY_S)
    while not received.endswith(b"\n"):
        try:
            data = connection.recv(_LONGEST_LINE)
        except TimeoutError:
            if time.monotonic() >= deadline_s:
                raise
            remind()
            continue
        if not data:
            break
        received += data
    return bytes(received)


def _decode(line: bytes | bytearray) -> dict[str, Any]:
    """The object of a line of ours; empty for anything else."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _listen(cluster: Cluster) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(
            ("", cluster.port), family=family, dualstack_ipv6=dual, backlog=min(cluster.num_processes, 1024)
        )
    except OSError as error:
        _ask_twin(cluster)
        raise UserError(
            f"MASTER_PORT={cluster.port} cannot be had on this node, which has rank 0 ({error.strerror}). Choose "
            "another one, the same on all nodes, for example MASTER_PORT=29501, or end what listens there."
        ) from error


def _ask_twin(cluster: Cluster) -> None:
    """Is it another process of this run that has the port, as rank 0, too? Raises what that one says."""
    answer: dict[str, Any] = {}
    with contextlib.suppress(OSError), socket.create_connection(("localhost", cluster.port), _TWIN_S) as connection:
        connection.sendall(json.dumps(_card(cluster, "")).encode() + b"\n")
        answer = _decode(_line(connection, _TWIN_S))
    if "error" in answer:
        raise UserError(answer["error"])


def _two_say(rank: int, first: str, second: str, num_processes: int) -> str:
    return (
        f"Two processes say that they are rank {rank}: {first} and {second}. Every node needs a RANK of its own, 0 to "
        f"{num_processes - 1}, and one process."
    )


def _name(cluster: Cluster, ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    names = [f"{rank} ({cluster.hosts[rank]})" if cluster.hosts else str(rank) for rank in ranks[:_MOST_NAMED]]
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank {names[0]}" if len(ranks) == 1 else f"ranks {', '.join(names)}{more}"


def _cannot_start(rank: int, host: str, trouble: str) -> str:
    return f"Rank {rank} ({host}) cannot start, so nobody does: {trouble}"


def _absent(cluster: Cluster, missing: list[int], when: str, arrived: str = "") -> str:
    return (
        f"{_name(cluster, missing)} of {cluster.num_processes} did not come {when}"
        + (f"; rank 0 and {arrived} are there" if arrived else "")
        + ". Check that every node runs the same command with its own RANK, that MASTER_ADDR is the address of the "
        f"node with RANK=0 and MASTER_PORT={cluster.port} of it can be reached from the others, and that "
        f"WORLD_SIZE={cluster.num_processes} counts nodes, not GPUs. docs/multinode.md says more."
    )
