"""The order of a mixture: exact shares, every row once per pass, whole batches of one camera set; pure, resumable."""

from fractions import Fraction

import numpy as np
import pytest

from openpi_accel.data.loader import BadSample, Loader
from openpi_accel.data.mixture_order import MixtureOrder, Turns, whole_shares
from openpi_accel.data.order import SampleOrder
from openpi_accel.errors import UserError

ROWS = (11, 7, 5)
FROZEN = [21, 19, 10, 2, 11, 17, 16, 15, 5, 4, 1, 22, 9, 6, 3, 18]
STARTS = np.array([0, 11, 18, 23])
# One period of 10 samples holds 5, 3 and 2 of them.
WEIGHTS = (Fraction(1, 2), Fraction("0.3"), Fraction("0.2"))


def order_of(groups=("both", "both", "both"), batch_size=4, seed=3, weights=WEIGHTS) -> MixtureOrder:
    return MixtureOrder(ROWS, weights, groups, batch_size=batch_size, seed=seed)


def part_of(ids: np.ndarray) -> np.ndarray:
    return np.searchsorted(STARTS, ids, side="right") - 1


def same(rows: np.ndarray) -> np.ndarray:
    return rows


def test_whole_shares():
    assert whole_shares(WEIGHTS) == [5, 3, 2]
    assert whole_shares([Fraction(7)]) == [1]
    assert whole_shares([Fraction(6), Fraction("1.5")]) == [4, 1]
    with pytest.raises(UserError, match="fewer digits"):
        whole_shares([Fraction("0.333333333"), Fraction("0.666666666000001")])


def test_turns_count_themselves():
    turns = Turns([3, 1, 2], 9)
    members, before = turns.of(np.arange(600))
    for member in range(3):
        np.testing.assert_array_equal(before[members == member], np.arange(100 * [3, 1, 2][member]))
    assert all(np.bincount(members[i : i + 6]).tolist() == [3, 1, 2] for i in range(0, 600, 6))
    assert len({tuple(members[i : i + 6]) for i in range(0, 600, 6)}) > 10  # shuffled anew in each period
    far = np.array([6 * 10**12 + 5, 3])
    assert turns.of(far)[1][0] // [3, 1, 2][turns.of(far)[0][0]] == 10**12


def test_shares_are_exact_and_every_row_comes_once_per_pass():
    ids = order_of().rows(0, 770)
    for period in part_of(ids).reshape(-1, 10):
        assert np.bincount(period).tolist() == [5, 3, 2]
    for part, number in enumerate(ROWS):
        mine = ids[part_of(ids) == part] - STARTS[part]
        passes = mine[: len(mine) // number * number].reshape(-1, number)
        assert len(passes) > 20
        np.testing.assert_array_equal(np.sort(passes), np.tile(np.arange(number), (len(passes), 1)))
        assert not np.array_equal(passes[0], passes[1])


def test_whole_batches_of_one_camera_set_keep_the_shares():
    # Groups have 7/10 and 3/10 of the batches; in the first, parts 0 and 2 have 5/7 and 2/7 of the samples.
    order = order_of(("two", "one", "two"), batch_size=7)
    parts = part_of(order.rows(0, 700)).reshape(100, 7)
    assert {frozenset(batch) for batch in parts.tolist()} <= {frozenset({1}), frozenset({0, 2})}
    for period in parts.reshape(10, 70):
        assert np.bincount(period).tolist() == [35, 21, 14]
    for part, number in enumerate(ROWS):
        ids = order.rows(0, 700)
        mine = ids[part_of(ids) == part] - STARTS[part]
        np.testing.assert_array_equal(np.sort(mine[: 2 * number].reshape(2, -1)), np.tile(np.arange(number), (2, 1)))


@pytest.mark.parametrize("groups", [("a", "a", "a"), ("a", "b", "a"), ("a", "b", "c")])
def test_any_stretch_is_the_same_wherever_it_begins(groups):
    whole = order_of(groups).rows(0, 200)
    for first in (0, 1, 3, 4, 50, 117):
        for count in (0, 1, 4, 23):
            np.testing.assert_array_equal(order_of(groups).rows(first, count), whole[first : first + count])
    assert not np.array_equal(order_of(groups, seed=4).rows(0, 200), whole)


def test_the_order_itself_never_changes():
    assert order_of(("a", "b", "a")).rows(0, 16).tolist() == FROZEN


def test_parts_of_one_size_do_not_march_in_step():
    order = MixtureOrder((50, 50), (Fraction(1), Fraction(1)), "aa", batch_size=4, seed=0)
    ids = order.rows(0, 100)
    first, second = ids[ids < 50], ids[ids >= 50] - 50
    assert not np.array_equal(first, second) and not np.array_equal(first, SampleOrder(50, 0).rows(0, 50))


def test_a_far_position_costs_no_more_than_a_near_one(monkeypatch):
    made = []

    def counted(self, epoch, of=SampleOrder._epoch):
        made.append(epoch)
        return of(self, epoch)

    monkeypatch.setattr(SampleOrder, "_epoch", counted)
    assert len(order_of(("a", "b", "a")).rows(4 * 10**12, 8)) == 8
    assert len(made) <= 6 and min(made) > 10**10


@pytest.mark.parametrize("groups", [("a", "a", "a"), ("a", "b", "a")])
@pytest.mark.parametrize("process_count", [1, 2, 4])
@pytest.mark.parametrize("num_workers", [0, 3])
def test_the_same_for_any_number_of_workers_and_processes(groups, process_count, num_workers):
    expected = order_of(groups).rows(0, 40).reshape(10, 4)
    shares = []
    for process in range(process_count):
        with Loader(
            same, order_of(groups), 4, process_index=process, process_count=process_count, num_workers=num_workers
        ) as loader:
            shares.append([next(loader) for _ in range(10)])
    for number, batch in enumerate(expected):
        np.testing.assert_array_equal(np.concatenate([share[number].batch for share in shares]), batch)
        for share in shares:
            np.testing.assert_array_equal(share[number].sample_ids, batch)
    with Loader(same, order_of(groups), 4, num_workers=num_workers, start_sample=24) as loader:
        np.testing.assert_array_equal(next(loader).batch, expected[6])


def test_a_bad_row_gives_way_to_the_next_of_its_own_part():
    bad = {2, 12, 20}

    def load(ids: np.ndarray) -> np.ndarray:
        for row in ids.tolist():
            if row in bad:
                raise BadSample(row, f"row {row}")
        return ids

    groups = ("a", "b", "a")
    plain = order_of(groups).rows(0, 200)
    with Loader(load, order_of(groups), 4, num_workers=2, skip_bad=True) as loader:
        found = np.concatenate([next(loader).batch for _ in range(50)])
        assert loader.skipped.keys() == bad
    np.testing.assert_array_equal(part_of(found), part_of(plain))
    good = ~np.isin(plain, list(bad))
    np.testing.assert_array_equal(found[good], plain[good])
    assert not set(found.tolist()) & bad
    np.testing.assert_array_equal(order_of(groups).rows(0, 200, bad), found)
