"""Slow steps: when they are told, and who is said to hold the others up."""

import pytest

from openpi_accel.parallel.peers import Seat
from openpi_accel.train import watchdog
from openpi_accel.train.watchdog import COMPILE, DATA, END, SAVE, STEP, VALIDATE, StepClock, complaint, limit_s


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def seat(step: int, phase: str, phase_s: float = 1.0, silent_s: float = 0.0) -> Seat:
    return Seat(step=step, phase=phase, phase_s=phase_s, silent_s=silent_s)


def test_only_data_and_step_count_as_the_step() -> None:
    now = Clock()
    clock = StepClock(now)
    for index, (data_s, step_s, save_s) in enumerate([(1, 3, 0), (0, 2, 50), (1, 4, 0)]):
        clock.begin_step(index)
        now.now_s += data_s
        clock.begin(STEP)
        now.now_s += step_s
        with clock.doing(SAVE):
            now.now_s += save_s
            assert clock.elapsed_s() == save_s
        assert clock.elapsed_s() == data_s + step_s
        assert clock.median_s() == (None, None, 3.0)[index]  # of 4 and 2
    clock.begin_step(3)
    assert clock.median_s() == 4.0 and clock.elapsed_s() == 0.0
    now.now_s += 7
    assert clock.seat() == seat(3, DATA, 7.0)


@pytest.mark.parametrize(
    ("phase", "median_s", "limit"),
    [
        (STEP, 1.0, watchdog.SLOW_S),
        (DATA, 20.0, 200.0),
        (STEP, None, watchdog.LONG_S),  # the first steps
        (SAVE, 1.0, watchdog.LONG_S),
        (VALIDATE, 1.0, watchdog.LONG_S),
        (COMPILE, None, watchdog.LONG_S),
    ],
)
def test_what_takes_long_by_nature_may(phase: str, median_s: float | None, limit: float) -> None:
    assert limit_s(phase, median_s) == limit


def test_one_process_says_what_it_does() -> None:
    for seats in ({}, {0: seat(7, DATA)}):
        assert complaint(0, seat(7, DATA), seats, 41.6, 0.5) == (
            "warning: step 7 has been under way for 42 s (the latest ones took 0.5 s): this process is waiting for data"
        )
    text = complaint(0, seat(7, SAVE), {}, 2000, 0.5)
    assert text == "warning: saving a checkpoint at step 7 has taken 2000 s: this process is saving a checkpoint"


def test_the_one_behind_is_named_by_rank_0_and_by_itself() -> None:
    seats = {0: seat(9, STEP), 1: seat(9, STEP), 2: seat(8, DATA, 40), 3: seat(9, STEP)}
    said = {rank: complaint(rank, seats[rank], seats, 40, 0.5) for rank in seats}
    assert said[1] == said[3] == ""
    for rank in (0, 2):
        assert said[rank].endswith("it waits for rank 2: rank 2 is waiting for data, in step 8")


def test_of_those_in_the_same_step_the_one_that_does_not_compute_holds_up() -> None:
    seats = {0: seat(9, STEP), 1: seat(9, DATA), 2: seat(9, STEP)}
    assert "it waits for rank 1: rank 1 is waiting for data" in complaint(0, seats[0], seats, 40, 0.5)


def test_where_all_compute_the_collective_is_at_fault() -> None:
    seats = {rank: seat(9, STEP) for rank in range(3)}
    assert "all ranks are running the step, so a collective does not end" in complaint(0, seats[0], seats, 40, 0.5)


def test_one_that_is_not_heard_of_is_named_first() -> None:
    seats = {0: seat(9, STEP), 1: seat(8, DATA), 2: seat(9, STEP, silent_s=watchdog.SILENT_S + 9)}
    assert complaint(0, seats[0], seats, 40, 0.5).endswith("nothing was heard of rank 2 for 19 s")
    seats[2] = seat(9, END, silent_s=100)  # has said that it ends
    assert "waits for rank 1" in complaint(0, seats[0], seats, 40, 0.5)


@pytest.mark.parametrize("phase", [SAVE, VALIDATE, COMPILE])
def test_no_alarm_while_the_other_does_what_takes_long(phase: str) -> None:
    seats = {0: seat(9, STEP), 1: seat(8, phase, 100)}
    assert complaint(0, seats[0], seats, 90, 0.5) == ""
    seats[1] = seat(8, phase, watchdog.LONG_S + 1)
    assert f"rank 1 is {phase}" in complaint(0, seats[0], seats, 90, 0.5)
