"""The order of a weighted mixture of datasets: pure in (seed, sample number), constant time at any point.

A batch holds samples of parts with the same cameras alone (a group), so that one program is compiled per group. First
batches are dealt out to groups, then a group's samples to its parts, then a part's rows are visited in an order of its
own. Both dealings are exact over a period and shuffled anew in each.
"""

import collections
import math
from collections.abc import Collection, Hashable, Sequence
from fractions import Fraction

import numpy as np

from openpi_accel.data.order import SampleOrder, permutation
from openpi_accel.errors import UserError

MAX_PERIOD = 100_000
# Set the random streams apart from each other and from a single dataset's.
_TURNS, _ROWS = 0x7475726E, 0x726F7773


def whole_shares(weights: Sequence[Fraction]) -> list[int]:
    """The smallest whole numbers that stand to each other as the weights do; their sum is the period.

    Raises:
        UserError: the period is longer than MAX_PERIOD.
    """
    common = math.lcm(*(weight.denominator for weight in weights))
    counts = [int(weight * common) for weight in weights]
    shared = math.gcd(*counts)
    counts = [count // shared for count in counts]
    if sum(counts) > MAX_PERIOD:
        raise UserError(
            f"the weights {', '.join(f'{float(weight):g}' for weight in weights)} come out even only after "
            f"{sum(counts)} samples. Write them with fewer digits (at most {MAX_PERIOD} samples)."
        )
    return counts


class Turns:
    """Who comes when: member i has counts[i] of every sum(counts) turns, in an order shuffled anew each time."""

    def __init__(self, counts: Sequence[int], *key: int) -> None:
        """`key` seeds the shuffling."""
        self._counts, self._period, self._key = np.asarray(counts, np.int64), sum(counts), key
        self._members = np.repeat(np.arange(len(counts)), self._counts)
        self._periods: collections.OrderedDict[int, tuple[np.ndarray, np.ndarray]] = collections.OrderedDict()

    def of(self, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each turn the member, and how many turns that member has had before it: two int64 arrays."""
        members, before = np.empty(len(turns), np.int64), np.empty(len(turns), np.int64)
        periods, places = np.divmod(turns, self._period)
        for period in np.unique(periods).tolist():
            mine = periods == period
            member_at, before_at = self._shuffled(period)
            members[mine] = member_at[places[mine]]
            before[mine] = period * self._counts[members[mine]] + before_at[places[mine]]
        return members, before

    def _shuffled(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Place in the period -> member, and its turns before within the period."""
        if period not in self._periods:
            member_at = self._members[permutation((*self._key, period), self._period)]
            before_at = np.empty_like(member_at)
            for member, count in enumerate(self._counts.tolist()):
                before_at[member_at == member] = np.arange(count)
            self._periods[period] = member_at, before_at
            if len(self._periods) > 2:
                self._periods.popitem(last=False)
        return self._periods[period]


class MixtureOrder:
    """Sample number to row, the parts' rows being numbered through: part 0's, then part 1's, and so on.

    Of any long stretch of samples a part has its weight's share. It visits its own rows as a single dataset does: every
    one once per pass, each pass in another order; a part with a large weight and few rows is passed more often than
    others. An epoch of a mixture is as many samples as its parts have rows; in it part p is passed
    share(p) * num_rows / rows(p) times. Nothing but the reader of a log depends on that figure.

    The samples that a batch holds depend on the batch size where there are several groups.
    """

    def __init__(
        self,
        num_rows: Sequence[int],
        weights: Sequence[Fraction],
        groups: Sequence[Hashable],
        *,
        batch_size: int,
        seed: int,
    ) -> None:
        """One entry per part.

        Args:
            num_rows: rows of the part.
            weights: positive; only their ratios count.
            groups: parts whose groups are equal may share a batch.
            batch_size: of all processes together.
            seed: of the whole run.

        Raises:
            UserError: weights with too many digits.
        """
        self._starts = np.concatenate([[0], np.cumsum(num_rows)])
        self._batch_size = batch_size
        self._parts = [SampleOrder(number, seed, _ROWS, part) for part, number in enumerate(num_rows)]
        names = list(dict.fromkeys(groups))
        self._members = [[part for part, group in enumerate(groups) if group == name] for name in names]
        of_group = [sum((weights[part] for part in members), Fraction(0)) for members in self._members]
        self._group_turns = Turns(whole_shares(of_group), seed, _TURNS)
        self._part_turns = [
            Turns(whole_shares([weights[part] for part in members]), seed, _TURNS, 1 + number)
            for number, members in enumerate(self._members)
        ]

    @property
    def num_rows(self) -> int:
        """Of all parts."""
        return int(self._starts[-1])

    def rows(self, first: int, count: int, skipped: Collection[int] = ()) -> np.ndarray:
        """The rows of samples first..first+count-1: (count,) int64.

        In place of a row that is skipped comes the next one of its part's order that is not.

        Raises:
            UserError: every row of a part is skipped.
        """
        pieces = []
        while count > 0:
            batch, at = divmod(first, self._batch_size)
            here = min(count, self._batch_size - at)
            pieces.append(self._within(batch, at, here, skipped))
            first, count = first + here, count - here
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def _within(self, batch: int, at: int, count: int, skipped: Collection[int]) -> np.ndarray:
        """Samples at..at+count-1 of a batch."""
        (group,), (batches_before,) = self._group_turns.of(np.array([batch]))
        members, before = self._part_turns[group].of(batches_before * self._batch_size + at + np.arange(count))
        rows = np.empty(count, np.int64)
        for member in np.unique(members).tolist():
            part, mine = self._members[group][member], members == member
            start, stop = int(self._starts[part]), int(self._starts[part + 1])
            bad = {row - start for row in skipped if start <= row < stop}
            # The turns of a member within a stretch of samples follow on one another.
            rows[mine] = start + self._parts[part].rows(int(before[mine][0]), int(mine.sum()), bad)
        return rows
