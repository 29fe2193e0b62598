"""The order is a function of (seed, epoch) alone; positions resume; nothing is left behind."""

import threading
import time

import numpy as np
import pytest

from openpi_accel.data.loader import BadSample, LoadedBatch, Loader
from openpi_accel.data.order import SampleOrder, epoch_order
from openpi_accel.errors import UserError

ORDER_42_0 = [0, 1, 4, 2, 6, 5, 7, 3]
ORDER_42_1 = [7, 3, 4, 2, 5, 6, 0, 1]


def same(rows: np.ndarray) -> np.ndarray:
    return rows


def slow_for_some(rows: np.ndarray) -> np.ndarray:
    time.sleep(0.002 * (int(rows[0]) % 4))  # batches finish in another order than they were begun
    return rows


def take(count: int, num_rows: int = 23, batch_size: int = 6, seed: int = 3, **options: int) -> list[LoadedBatch]:
    with Loader(slow_for_some, SampleOrder(num_rows, seed), batch_size, **options) as loader:
        return [next(loader) for _ in range(count)]


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "data-worker" in thread.name]


def test_every_row_once_per_epoch_across_the_border() -> None:
    ids = np.concatenate([batch.sample_ids for batch in take(23)])  # 6 epochs of 23
    epochs = ids.reshape(6, 23)
    for number, epoch in enumerate(epochs):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(23))
        np.testing.assert_array_equal(epoch, epoch_order(3, number, 23))
    assert not np.array_equal(epochs[0], epochs[1])


def test_the_order_itself_never_changes() -> None:
    assert epoch_order(42, 0, 8).tolist() == ORDER_42_0
    assert epoch_order(42, 1, 8).tolist() == ORDER_42_1
    assert not np.array_equal(epoch_order(0, 1, 50), epoch_order(1, 0, 50))


@pytest.mark.parametrize("num_workers", [0, 1, 2, 5])
@pytest.mark.parametrize("prefetch_batches", [1, 4])
def test_the_same_for_any_number_of_workers(num_workers: int, prefetch_batches: int) -> None:
    expected = SampleOrder(23, 3)
    for i, loaded in enumerate(take(12, num_workers=num_workers, prefetch_batches=prefetch_batches)):
        np.testing.assert_array_equal(loaded.sample_ids, expected.rows(6 * i, 6))
        np.testing.assert_array_equal(loaded.batch, loaded.sample_ids)
        assert loaded.next_sample == 6 * (i + 1)
    assert not workers()


@pytest.mark.parametrize("process_count", [2, 3, 6])
def test_processes_share_the_global_batch(process_count: int) -> None:
    whole = take(9)
    parts = [take(9, process_index=i, process_count=process_count) for i in range(process_count)]
    for i, batch in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([part[i].batch for part in parts]), batch.sample_ids)
        for part in parts:
            np.testing.assert_array_equal(part[i].sample_ids, batch.sample_ids)
            assert part[i].next_sample == batch.next_sample


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumes_at_any_position(num_workers: int) -> None:
    straight = take(10)
    for done in (1, 3, 4, 9):
        resumed = take(10 - done, num_workers=num_workers, start_sample=straight[done - 1].next_sample)
        for one, other in zip(straight[done:], resumed, strict=True):
            np.testing.assert_array_equal(one.sample_ids, other.sample_ids)
            assert one.next_sample == other.next_sample


def test_a_far_position_costs_no_more_than_a_near_one() -> None:
    start = 10**12 * 1000 + 37
    made = []
    order = SampleOrder(1000, 0)
    order._epoch = lambda epoch: (made.append(epoch), epoch_order(0, epoch, 1000))[1]  # type: ignore[method-assign,func-returns-value]
    assert len(order.rows(start, 8)) == 8
    assert made == [10**12]


def test_batches_are_made_ahead_but_not_endlessly() -> None:
    begun = []
    loader = Loader(lambda rows: begun.append(1), SampleOrder(100, 0), 10, num_workers=2, prefetch_batches=3)
    assert not begun and not workers()  # nothing runs before the first batch is asked for
    next(loader)
    time.sleep(0.1)
    assert len(begun) == 4
    loader.close()


def fail_at(bad: int, error: Exception) -> Loader:
    def load(rows: np.ndarray) -> np.ndarray:
        if bad in rows:
            raise error
        return rows

    return Loader(load, SampleOrder(20, 0), 5, num_workers=2)


def test_an_exception_says_where_it_happened() -> None:
    order = epoch_order(0, 0, 20)
    loader = fail_at(int(order[12]), RuntimeError("disk on fire"))
    assert [next(loader).next_sample for _ in range(2)] == [5, 10]
    with pytest.raises(RuntimeError, match="disk on fire") as error:
        next(loader)
    rows = ", ".join(map(str, order[10:15]))
    assert f"samples 10 to 14 (dataset rows {rows})" in "".join(error.value.__notes__)
    assert not workers()
    with pytest.raises(RuntimeError, match="disk on fire"):  # the position stays: nothing is skipped in silence
        next(loader)


def test_a_users_mistake_keeps_its_words() -> None:
    with pytest.raises(UserError) as error:
        next(fail_at(int(epoch_order(0, 0, 20)[0]), UserError("episode 3, frame 7: not an image")))
    assert str(error.value) == "episode 3, frame 7: not an image"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_closing_early_waits_for_the_threads_and_can_go_on(num_workers: int) -> None:
    running = []

    def load(rows: np.ndarray) -> np.ndarray:
        running.append(1)
        time.sleep(0.05)
        running.pop()
        return rows

    loader = Loader(load, SampleOrder(100, 0), 10, num_workers=num_workers)
    first = next(loader)
    loader.close()
    assert not running and not workers()
    loader.close()
    np.testing.assert_array_equal(next(loader).sample_ids, SampleOrder(100, 0).rows(first.next_sample, 10))
    loader.close()
    assert not workers()


def test_batches_that_cannot_be() -> None:
    with pytest.raises(UserError, match="--batch-size 10 does not divide over 4 processes. Take 8 or 12"):
        Loader(same, SampleOrder(100, 0), 10, process_count=4)
    with pytest.raises(UserError, match="does not divide over 4 processes. Take 4"):
        Loader(same, SampleOrder(100, 0), 2, process_count=4)
    with pytest.raises(UserError, match="more than the 11 frames .* Take --batch-size=10 or less"):
        Loader(same, SampleOrder(11, 0), 12, process_count=2)
    with pytest.raises(UserError, match="more than the 3 frames .* Use fewer processes"):
        Loader(same, SampleOrder(3, 0), 4, process_count=4)
    assert len(next(Loader(same, SampleOrder(12, 0), 12, num_workers=0)).sample_ids) == 12


class Damaged:
    """Rows that cannot be loaded; tells how often each was tried."""

    def __init__(self, bad: set[int]) -> None:
        self.bad, self.tried = bad, []

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        for row in rows.tolist():
            if row in self.bad:
                self.tried.append(row)
                raise BadSample(row, f"row {row} is damaged")
        return rows


def expected_with_skips(bad: set[int], num_rows: int, seed: int, count: int) -> list[int]:
    """Slowly: each bad row of an epoch's order gives way to the next good one, cyclically."""
    rows: list[int] = []
    for epoch in range(-(-count // num_rows)):
        order = epoch_order(seed, epoch, num_rows).tolist()
        for at in range(num_rows):
            while order[at % num_rows] in bad:
                at += 1
            rows.append(order[at % num_rows])
    return rows[:count]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_bad_samples_are_an_error_or_replaced(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    bad = {2, 3, 11}
    with (
        Loader(Damaged(bad), SampleOrder(23, 3), 6, num_workers=num_workers) as loader,
        pytest.raises(BadSample, match="damaged"),
    ):
        for _ in range(4):
            next(loader)
    load = Damaged(bad)
    with Loader(load, SampleOrder(23, 3), 6, num_workers=num_workers, skip_bad=True) as loader:
        found = [next(loader) for _ in range(12)]
    assert np.concatenate([batch.batch for batch in found]).tolist() == expected_with_skips(bad, 23, 3, 72)
    assert np.concatenate([batch.sample_ids for batch in found]).tolist() == SampleOrder(23, 3).rows(0, 72).tolist()
    assert loader.skipped == {row: f"row {row} is damaged" for row in bad}
    assert sum("left out" in text for text in caplog.messages) >= 3
    assert not workers()


def test_a_resumed_run_and_every_process_skip_alike() -> None:
    bad = {2, 3, 11}
    expected = expected_with_skips(bad, 23, 3, 72)
    load = Damaged(bad)
    skipped = dict.fromkeys(bad, "known")
    with Loader(load, SampleOrder(23, 3), 6, num_workers=2, skip_bad=True, skipped=skipped, start_sample=30) as loader:
        assert np.concatenate([next(loader).batch for _ in range(7)]).tolist() == expected[30:]
    assert load.tried == []  # known ones are not tried again
    for process in range(2):
        with Loader(
            Damaged(bad), SampleOrder(23, 3), 6, process_index=process, process_count=2, skip_bad=True
        ) as loader:
            found = [next(loader).batch.tolist() for _ in range(12)]
        assert found == [expected[6 * i + 3 * process :][:3] for i in range(12)]


def test_nothing_but_bad_samples() -> None:
    with (
        Loader(Damaged(set(range(5))), SampleOrder(5, 0), 2, skip_bad=True) as loader,
        pytest.raises(UserError, match="Every sample is bad"),
    ):
        next(loader)
