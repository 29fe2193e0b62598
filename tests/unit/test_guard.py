"""The thread beside the training, with a stand-in for JAX's store."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn
from unittest import mock

import jax
import pytest

from openpi_accel.errors import OtherProcessEnded, UserError
from openpi_accel.parallel.last_words import LastWords
from openpi_accel.parallel.peers import Peers, Seat
from openpi_accel.train import guard as guard_module
from openpi_accel.train.guard import MISSED_EXIT_CODE, Guard
from openpi_accel.train.preemption import Preemption
from openpi_accel.train.watchdog import END, STEP
from tests.conftest import REPO


class Store:
    """What JAX's client does with keys."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.values[key] = value

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.values[key]

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in list(self.values.items()) if key.startswith(folder + "/")]


class Member(Peers):
    """A process of two; instead of ending it notes its exit code."""

    def __init__(self, store: Store, rank: int) -> None:
        super().__init__(store)
        self.rank, self.count = rank, 2
        self.left = threading.Event()
        self.exit_code: int | None = None
        self.gone = ""

    def leave(self, exit_code: int, linger_s: float = 0.0) -> NoReturn:
        self.exit_code = exit_code
        self.left.set()
        raise SystemExit  # which ends the thread, as the end of the process would

    def last_words(self, speak: Callable[[], int]) -> Any:
        self.speak = speak  # what an abort of the process would call
        return mock.Mock(spec=LastWords)

    def first_is_gone(self) -> str:
        return self.gone


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_TICK_S", 0.02), ("_OWN_WORDS_S", 0.2), ("_CULPRIT_S", 20.0)):
        monkeypatch.setattr(guard_module, name, value)
    for module in ("openpi_accel.train.guard", "openpi_accel.train.watchdog"):
        monkeypatch.setattr(f"{module}.SILENT_S", 1.0)
    report = threading.excepthook
    monkeypatch.setattr(threading, "excepthook", lambda what: None if what.exc_type is SystemExit else report(what))


@pytest.fixture
def members() -> tuple[Member, Member]:
    store = Store()
    return Member(store, 0), Member(store, 1)


def until(happened: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_told_failure_ends_the_other_with_the_same_code(members: tuple[Member, Member]) -> None:
    first, second = members
    said: list[str] = []
    watching = Guard(peers=first, say=said.append)
    watching.committed = lambda: 40
    with watching:
        with pytest.raises(UserError), Guard(peers=second, say=said.append):
            raise UserError("frame 17 is damaged.")
        assert first.left.wait(60)
    assert first.exit_code == 2
    assert said == [
        "error: rank 1: frame 17 is damaged; checkpoint 40 is complete: go on with --resume (launchers: RESUME=1)"
    ]


def test_who_ends_for_the_same_reason_does_so_in_its_own_words(members: tuple[Member, Member]) -> None:
    for member in members:
        with pytest.raises(UserError, match="nothing lies there"), Guard(peers=member):
            raise UserError("nothing lies there")
    assert all(member.exit_code is None for member in members)


@pytest.mark.parametrize("told", [True, False])
def test_a_broken_collective_is_the_fault_of_who_has_gone(members: tuple[Member, Member], told: bool) -> None:
    first, second = members
    second.post(Seat(step=3, phase=STEP, phase_s=0))
    if told:
        second.tell_failure("error: rank 1: KeyError: 'x'", 1)
    with pytest.raises(OtherProcessEnded) as caught, Guard(peers=first, say=lambda _: None):
        raise ValueError("UNKNOWN: Gloo AllReduce failed: Connection closed by peer")
    words, code = ("rank 1: KeyError: 'x'", 1) if told else ("rank 1 ended without a word", MISSED_EXIT_CODE)
    assert words in str(caught.value) and caught.value.exit_code == code
    assert first.failures()[0][1] == code  # for those that a broken collective does not reach


def test_ones_own_fault_stays_ones_own(members: tuple[Member, Member]) -> None:
    with pytest.raises(KeyError), Guard(peers=members[0]):
        raise KeyError("x")
    assert members[1].failures() == {0: ("error: rank 0: KeyError: 'x'", 1)}


def test_a_full_device_is_no_other_process_s_fault(members: tuple[Member, Member]) -> None:
    members[1].tell_failure("error: rank 1: the disk is full", 2)
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1GiB")
    with pytest.raises(jax.errors.JaxRuntimeError), Guard(peers=members[0], say=lambda _: None):
        raise full
    text, code = members[1].failures()[0]
    assert code == 2 and text.startswith("error: rank 0: a device's memory is full")


def test_silence_is_told_and_ends_nobody(members: tuple[Member, Member]) -> None:
    first, second = members
    said: list[str] = []
    second.post(Seat(step=3, phase=STEP, phase_s=0))
    with Guard(peers=first, say=said.append):
        until(lambda: said)
        time.sleep(0.2)
    assert len(said) == 1 and said[0].startswith("warning: nothing was heard of rank 1 for 1 s.")
    assert first.exit_code is None


def test_who_has_said_that_it_ends_is_not_missed(members: tuple[Member, Member]) -> None:
    first, second = members
    with Guard(peers=second):
        pass
    assert first.seats()[1].phase == END
    said: list[str] = []
    with Guard(peers=first, say=said.append):
        time.sleep(1.5)
    assert said == []


def test_a_save_that_failed_here_ends_both(members: tuple[Member, Member]) -> None:
    first, second = members
    said: list[str] = []
    watching = Guard(peers=second, say=said.append)
    watching.save_problem = lambda: UserError("the disk is full")
    with watching:
        assert second.left.wait(60)
    assert second.exit_code == 2 and said == ["error: the disk is full"]
    assert first.failures() == {1: ("error: rank 1: the disk is full", 2)}


def test_the_end_of_the_grace_ends_the_process(members: tuple[Member, Member]) -> None:
    first, second = members
    said: list[str] = []
    watching = Guard(Preemption(0.5, 75), first, said.append)
    watching.committed = lambda: None
    with watching:
        watching.clock.begin_step(8)
        watching.clock.begin(STEP)
        first._client.key_value_set("RECEIVED_PREEMPTION_NOTICE", "now")  # as JAX does
        assert first.left.wait(60)
    assert first.exit_code == 75
    assert said == [
        "SIGTERM: --grace-s 0.5 is nearly over, and running the step is not done; this run has no checkpoint yet"
    ]
    assert second.failures()[0][1] == 75


def test_sigterm_before_training_ends_it_at_once(members: tuple[Member, Member]) -> None:
    first, _ = members
    first._client.key_value_set("RECEIVED_PREEMPTION_NOTICE", "now")
    said: list[str] = []
    with Guard(Preemption(1000, 143), first, said.append):
        assert first.left.wait(60)
    assert first.exit_code == 143 and said[0].startswith("SIGTERM before training began")


def test_a_slow_step_is_told_each_time_twice_as_late(
    members: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openpi_accel.train.watchdog.SLOW_S", 0.3)
    first, _ = members
    first.count = 1
    said: list[str] = []
    with Guard(peers=first, say=said.append) as watching:
        for index in range(3):
            watching.clock.begin_step(index)
            watching.clock.begin(STEP)
        until(lambda: len(said) == 3)
        for index in range(3, 20):
            watching.clock.begin_step(index)
    took = [float(text.split("under way for ")[1].split(" s")[0]) for text in said]
    assert took == sorted(took) and took[-1] >= 1  # 0.3, 0.6 and 1.2 s, rounded
    assert all("step 2 " in text for text in said)


def test_an_abort_is_told_with_what_is_known_by_then(members: tuple[Member, Member]) -> None:
    first, second = members
    said: list[str] = []
    watching = Guard(peers=second, say=said.append)
    with watching:
        assert second.speak() == MISSED_EXIT_CODE
        watching.committed = lambda: 40
        second.gone = "10.0.0.1:29500 does not answer"
        assert second.speak() == MISSED_EXIT_CODE
        first.tell_failure("error: rank 0: frame 17 is damaged", 2)
        assert second.left.wait(60)  # it has heard of it
        assert second.speak() == 2
    kept = "checkpoint 40 is complete: go on with --resume (launchers: RESUME=1)"
    damaged = f"error: rank 0: frame 17 is damaged; {kept}"
    assert said == [
        "error: rank 1 was aborted by JAX or another library; its own lines above say why; nothing was trained, and "
        "checkpoints from before stay as they are",
        "error: rank 0 ended without a word: 10.0.0.1:29500 does not answer. The reason is in the log there, or the "
        f"platform killed it; {kept}",
        damaged,
        damaged,
    ]


def test_an_abort_names_who_was_silent_and_does_not_speak_twice(members: tuple[Member, Member]) -> None:
    first, second = members
    said: list[str] = []
    second.post(Seat(step=3, phase=STEP, phase_s=0))
    with Guard(peers=first, say=said.append):
        until(lambda: said)
        assert first.speak() == MISSED_EXIT_CODE
    assert said[1].startswith("error: rank 1 ended without a word, and JAX ends the others")
    with pytest.raises(UserError), Guard(peers=second, say=said.append):
        raise UserError("nothing lies there")  # which the entry script prints
    assert second.speak() == 2 and len(said) == 2


def test_a_store_that_does_not_answer_for_a_while_does_not_silence_the_guard(
    members: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = members
    said: list[str] = []
    with Guard(peers=first, say=said.append):
        with monkeypatch.context() as stalled:
            failed = threading.Event()

            def refuse(*_: object) -> None:
                failed.set()
                raise jax.errors.JaxRuntimeError("UNAVAILABLE")

            stalled.setattr(first, "post", refuse)
            assert failed.wait(60)
        second.tell_failure("error: rank 1: KeyError: 'x'", 1)
        assert first.left.wait(60) and first.exit_code == 1


def test_a_rank_0_that_stands_still_is_told_apart_from_one_that_is_gone(
    members: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with Guard(peers=members[1], say=said.append):
        stalled = threading.Event()
        monkeypatch.setattr(members[1], "post", lambda _: stalled.wait(60))  # as a call to a stopped process
        time.sleep(1.5)
        assert members[1].speak() == MISSED_EXIT_CODE
        stalled.set()
    assert said[-1].startswith("error: rank 0 stands still: nothing was heard of it for ")


COMPILING = """
import hashlib, signal
from openpi_accel.train.guard import Guard
from openpi_accel.train.preemption import Preemption
with Guard(Preemption(30, 75)):
    signal.signal(signal.SIGINT, lambda *_: None)  # as where the compiler swallows the exception
    print("compiling", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)  # C code that no signal interrupts, as the compiler
"""


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGTERM, 75, "SIGTERM before training began, so there is nothing to save; "),
        (signal.SIGINT, 130, "interrupted; "),
    ],
)
def test_a_signal_while_the_step_is_compiled_is_obeyed_with_a_word(number: int, code: int, words: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMPILING], cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "compiling\n"
        process.send_signal(number)
        assert (
            process.communicate(timeout=60)[1]
            == words + "nothing was trained, and checkpoints from before stay as they are\n"
        )
        assert process.returncode == code
    finally:
        process.kill()


def test_a_finished_process_waits_for_one_that_still_closes(members: tuple[Member, Member]) -> None:
    """JAX's own wait is a minute, and then it ends all with an abort."""
    first, second = members
    closing = threading.Event()

    def slow() -> None:
        with Guard(peers=first, say=lambda _: None):
            closing.wait(60)

    other = threading.Thread(target=slow)
    other.start()
    until(lambda: 0 in second.seats())
    with Guard(peers=second, say=lambda _: None):
        threading.Timer(1.5, closing.set).start()  # longer than silence would be allowed to last
        started_s = time.monotonic()
    assert time.monotonic() - started_s > 1.4 and closing.is_set()
    other.join(60)
    assert not other.is_alive()


@pytest.mark.parametrize(
    ("problem", "why"), [("", ""), ("it does not answer", ": it does not answer. The reason is in")]
)
def test_a_collective_that_fails_when_rank_0_has_gone_is_not_ones_own_fault(
    members: tuple[Member, Member], problem: str, why: str
) -> None:
    said: list[str] = []
    watching = Guard(peers=members[1], say=said.append)
    watching.committed, members[1].gone = lambda: 7, problem
    with pytest.raises(
        OtherProcessEnded, match=f"rank 0 ended without a word{why}.*; checkpoint 7 is complete"
    ) as caught:
        watching.__enter__()
        broken = ValueError("UNKNOWN: Gloo AllReduce failed: Connection closed by peer")
        with mock.patch.object(Member, "failures", side_effect=jax.errors.JaxRuntimeError("UNAVAILABLE")):
            watching.__exit__(ValueError, broken, None)
    assert caught.value.exit_code == MISSED_EXIT_CODE and said == []
    # JAX aborts while that is printed: its lines come after, so the words come once more.
    assert watching._speak_last() == MISSED_EXIT_CODE and said == [f"error: {caught.value}"]


def test_the_guard_outlives_an_error_of_its_own(members: tuple[Member, Member]) -> None:
    said: list[str] = []
    watching = Guard(peers=members[0], say=said.append)
    watching.save_problem = mock.Mock(side_effect=[OSError(116, "Stale file handle")] * 5 + [None] * 10**6)
    with watching:
        until(lambda: watching.save_problem.call_count > 8)  # type: ignore[attr-defined]
    assert said == ["warning: the watch over this run: OSError: [Errno 116] Stale file handle"]


def test_the_last_words_name_who_was_silent_even_where_rank_0_has_left_since(members: tuple[Member, Member]) -> None:
    said: list[str] = []
    watching = Guard(peers=members[1], say=said.append)
    watching._silent, members[1].gone = {3}, "Connection refused"
    assert watching._speak_last() == MISSED_EXIT_CODE
    assert said[0].startswith("error: rank 3 ended without a word, and JAX ends the others")
