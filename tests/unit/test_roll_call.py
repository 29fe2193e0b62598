"""Who is there before JAX starts: threads stand for the processes."""

import contextlib
import socket
import threading
import time

import pytest

from openpi_accel.errors import UserError
from openpi_accel.parallel.platforms import Cluster
from openpi_accel.parallel.roll_call import await_coordinator, roll_call


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Roll:
    """Runs roll calls in threads; `outcomes` holds None, or the message of a UserError."""

    def __init__(self) -> None:
        self.port = free_port()
        self.outcomes: dict[str, str | None] = {}
        self.said: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(
        self,
        name: str,
        rank: int,
        size: int = 3,
        timeout_s: float = 10,
        hosts: tuple[str, ...] = (),
        trouble: str = "",
    ) -> None:
        cluster = Cluster(
            host="127.0.0.1", port=self.port, num_processes=size, process_id=rank, started_by="a test", hosts=hosts
        )

        def call() -> None:
            try:
                roll_call(cluster, timeout_s, self.said.append, remind_s=0.2, trouble=trouble)
                self.outcomes[name] = None
            except UserError as error:
                self.outcomes[name] = str(error)

        self._threads.append(threading.Thread(target=call))
        self._threads[-1].start()

    def join(self) -> dict[str, str | None]:
        for thread in self._threads:
            thread.join(timeout=30)
            assert not thread.is_alive()
        return self.outcomes

    def connect(self) -> socket.socket:
        for _ in range(100):
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self.port))
            time.sleep(0.05)
        raise AssertionError("rank 0 does not listen")


def test_all_are_there_and_the_port_is_free_again() -> None:
    roll = Roll()
    roll.start("2", 2)
    roll.start("1", 1)
    time.sleep(0.3)  # they come before rank 0 listens
    roll.start("0", 0)
    assert roll.join() == {"0": None, "1": None, "2": None}
    socket.create_server(("127.0.0.1", roll.port)).close()
    assert roll.outcomes["0"] is None


def test_everyone_is_told_who_is_missing() -> None:
    roll = Roll()
    roll.start("0", 0, size=4, timeout_s=1.5, hosts=("a", "b", "c", "d"))
    roll.start("1", 1, size=4, timeout_s=1.5)
    outcomes = roll.join()
    assert outcomes["0"] == outcomes["1"]
    assert outcomes["0"] is not None
    assert outcomes["0"].startswith("ranks 2 (c), 3 (d) of 4 did not come within 1.5 s; rank 0 and 1 (")
    assert f"MASTER_PORT={roll.port}" in outcomes["0"]
    assert any(line.startswith("waiting for ranks 2 (c), 3 (d) (") for line in roll.said)


def test_rank_0_is_missing() -> None:
    roll = Roll()
    roll.start("1", 1, size=2, timeout_s=1)
    assert (roll.join()["1"] or "").startswith(
        f"rank 0 of 2 did not come at 127.0.0.1:{roll.port} within 1 s: [Errno 111] Connection refused"
    )


def test_two_of_the_same_rank() -> None:
    roll = Roll()
    roll.start("0", 0)
    roll.start("1", 1)
    roll.start("also 1", 1)
    for message in roll.join().values():
        assert "Two processes say that they are rank 1" in (message or "")


def test_nodes_that_were_told_of_different_sizes() -> None:
    roll = Roll()
    roll.start("0", 0, size=2)
    roll.start("1", 1, size=16, timeout_s=3)
    outcomes = roll.join()
    assert outcomes["0"] == outcomes["1"] and "was told of 16 nodes, rank 0 of 2" in (outcomes["0"] or "")


def test_strangers_and_those_who_leave_do_not_count() -> None:
    roll = Roll()
    roll.start("0", 0, size=2, timeout_s=5)
    with roll.connect() as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n[1]\n")
        with roll.connect() as left:
            left.sendall(b'{"rank": 1, "num_processes": 2, "host": "gone"')  # half a line: not there yet
            time.sleep(0.2)
        roll.start("1", 1, size=2, timeout_s=5)
        assert roll.join() == {"0": None, "1": None}


def test_a_process_that_died_while_it_waited_may_come_again() -> None:
    roll = Roll()
    roll.start("0", 0, size=3, timeout_s=5)
    with roll.connect() as died:
        died.sendall(b'{"rank": 1, "num_processes": 3, "host": "gone"}\n')
        time.sleep(0.3)
    time.sleep(0.3)
    roll.start("1", 1)
    roll.start("2", 2)
    assert roll.join() == {"0": None, "1": None, "2": None}


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openpi_accel.parallel.roll_call._TWIN_S", 0.5)
    roll = Roll()
    with socket.create_server(("", roll.port)):
        roll.start("0", 0)
        assert f"MASTER_PORT={roll.port} cannot be had" in (roll.join()["0"] or "")


def test_one_that_cannot_start_is_not_waited_for() -> None:
    for troubled in (0, 1):
        roll = Roll()
        for rank in (0, 1, 2):
            roll.start(str(rank), rank, timeout_s=60, trouble="--seed is no number" if rank == troubled else "")
        outcomes = roll.join()  # long before the time is over
        assert len(set(outcomes.values())) == 1
        (message,) = set(outcomes.values())
        assert message is not None and message.startswith(f"Rank {troubled} (")
        assert message.endswith(") cannot start, so nobody does: --seed is no number")


def test_who_comes_later_hears_of_it_too() -> None:
    roll = Roll()
    roll.start("0", 0, timeout_s=60)
    roll.start("1", 1, timeout_s=60, trouble="no dataset")
    time.sleep(1)
    assert roll.outcomes == {}  # rank 0 stays a while
    roll.start("2", 2, timeout_s=60)
    assert all("no dataset" in (message or "") for message in roll.join().values()) and len(roll.outcomes) == 3


def test_it_does_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openpi_accel.parallel.roll_call._GRACE_S", 0.5)
    roll = Roll()
    roll.start("0", 0, timeout_s=60)
    roll.start("1", 1, timeout_s=60, trouble="no dataset")
    assert all("no dataset" in (message or "") for message in roll.join().values()) and len(roll.outcomes) == 2


def test_a_second_rank_0_is_turned_away_and_the_first_goes_on() -> None:
    roll = Roll()
    roll.start("first", 0, size=2)
    roll.connect().close()
    roll.start("twin", 0, size=2)
    while "twin" not in roll.outcomes:
        time.sleep(0.01)
    roll.start("other", 1, size=2)
    outcomes = roll.join()
    assert "Two processes say that they are rank 0" in str(outcomes.pop("twin"))
    assert outcomes == {"first": None, "other": None}
    assert any(line.startswith("warning: Two processes say that they are rank 0") for line in roll.said)


def test_who_waits_for_rank_0_says_so_and_what_it_hears() -> None:
    roll = Roll()

    def answer() -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                connection, _ = listener.accept()
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

    with socket.create_server(("127.0.0.1", roll.port)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        roll.start("other", 1, size=2, timeout_s=2)
        (outcome,) = roll.join().values()
        listener.shutdown(socket.SHUT_RDWR)
    found = "another program listens there, as it answers b'HTTP/1.1 400"
    assert found in str(outcome) and "choose another MASTER_PORT on all nodes" in str(outcome)
    assert any(line.startswith("waiting for rank 0 at 127.0.0.1:") and found in line for line in roll.said)


def test_the_coordinator_is_awaited_but_not_for_ever() -> None:
    port = free_port()
    cluster = Cluster(host="127.0.0.1", port=port, num_processes=2, process_id=1, started_by="a test")
    began_s = time.monotonic()
    await_coordinator(cluster, timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began_s < 2
    waiting = threading.Thread(target=await_coordinator, args=(cluster, 30))
    waiting.start()
    waiting.join(timeout=0.1)
    assert waiting.is_alive()
    with socket.create_server(("127.0.0.1", port)):
        waiting.join(timeout=10)
        assert not waiting.is_alive()


def test_nobody_listens_once_all_may_go_on() -> None:
    """So that who is answered on the port then has reached JAX."""
    roll = Roll()
    roll.start("0", 0, size=2)
    with roll.connect() as second:
        second.sendall(b'{"rank": 1, "num_processes": 2, "host": "b"}\n')
        assert second.recv(100) == b'{"go": true}\n'
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", roll.port), timeout=5).close()
    assert roll.join() == {"0": None}
