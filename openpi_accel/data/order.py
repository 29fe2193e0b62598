"""In which order training visits samples. Pure in the seed and the sample's number; constant time at any point."""

import collections
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from openpi_accel.errors import UserError


def permutation(key: Sequence[int], size: int) -> np.ndarray:
    """A permutation of 0..size-1, a function of the key's numbers.

    The numbers are sorted by the raw 64-bit output of Philox 4x64-10 (Salmon et al. 2011) keyed by numpy's
    SeedSequence(key). NumPy guarantees both streams for good, unlike those of `Generator.permutation`, so the order
    survives updates.
    """
    return np.argsort(np.random.Philox(np.random.SeedSequence(key)).random_raw(size), kind="stable")


def epoch_order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """The permutation of 0..num_rows-1 in which an epoch visits the rows."""
    return permutation((seed, epoch), num_rows)


class Order(Protocol):
    """Sample number, counted from the start of training over all epochs, to row."""

    @property
    def num_rows(self) -> int:
        """Rows are 0..num_rows-1."""

    def rows(self, first: int, count: int, skipped: Collection[int] = ()) -> np.ndarray:
        """The rows of samples first..first+count-1, others in place of skipped ones: (count,) int64.

        Raises:
            UserError: every row is skipped.
        """


class SampleOrder:
    """The order of one dataset: every row once per epoch, each epoch in another order."""

    def __init__(self, num_rows: int, *key: int) -> None:
        """`key` is the seed, and what sets this order apart from others of the same seed."""
        self.num_rows, self.key = num_rows, key
        self._epochs: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()

    def rows(self, first: int, count: int, skipped: Collection[int] = ()) -> np.ndarray:
        """The rows of samples first..first+count-1: (count,) int64; goes on into the next epoch.

        In place of a row that is skipped comes the next one of the epoch's order that is not.

        Raises:
            UserError: every row is skipped.
        """
        parts = []
        while count > 0:
            epoch, at = divmod(first, self.num_rows)
            order = self._epoch(epoch)
            part = order[at : at + count]
            parts.append(part if not skipped else self._without(skipped, order, at, part))
            first, count = first + len(part), count - len(part)
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _without(self, skipped: Collection[int], order: np.ndarray, at: int, part: np.ndarray) -> np.ndarray:
        part = part.copy()
        for i in range(len(part)):
            step = 0
            while int(part[i]) in skipped:
                step += 1
                if step == self.num_rows:
                    raise UserError("Every sample is bad: nothing is left to train on. Fetch the dataset again.")
                part[i] = order[(at + i + step) % self.num_rows]
        return part

    def _epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            self._epochs[epoch] = permutation((*self.key, epoch), self.num_rows)
            if len(self._epochs) > 2:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]
