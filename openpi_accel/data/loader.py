"""Batches in a fixed order (order.py), made ahead by workers (worker_pool.py).

The order is a pure function of the seed: the same for any number of workers and processes. Where bad samples are
skipped, each is replaced by the next good one of the epoch's order, so that what a batch holds depends on the seed and
on which samples are bad, and not on when that was found out.
"""

import collections
import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from openpi_accel.data.order import Order
from openpi_accel.data.worker_pool import LoadBatch, ThreadPool, WorkerDied, WorkerPool
from openpi_accel.errors import UserError

_MAX_NAMED = 8
_PATIENCE_S = 60.0
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LoadedBatch[T]:
    """One batch.

    Attributes:
        batch: this process's share, as `load_batch` made it.
        sample_ids: (batch_size,) the rows drawn for the global batch, before bad ones are replaced; equal in every
            process.
        next_sample: the position to resume from after this batch.
    """

    batch: T
    sample_ids: np.ndarray
    next_sample: int


class BadSample(UserError):
    """A sample that cannot be loaded. Raised by `load_batch`; the loader can go on without it.

    Attributes:
        row: which one, as it was asked for.
    """

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row = row

    def __reduce__(self) -> tuple[type["BadSample"], tuple[int, str]]:
        return BadSample, (self.row, str(self))


class Loader[T]:
    """Endless batches in the order's order; a batch may span the border of two epochs.

    Iterate, and `close` at the end (or use it as a context manager): afterwards no worker is left. One iteration at a
    time.

    Attributes:
        skipped: row -> why it is left out, of all rows skipped so far.
    """

    def __init__(
        self,
        load_batch: LoadBatch[T],
        order: Order,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
        num_workers: int = 2,
        prefetch_batches: int = 4,
        start_sample: int = 0,
        start_pool: Callable[[LoadBatch[T], int], WorkerPool[T]] = ThreadPool,
        describe: Callable[[np.ndarray], str] | None = None,
        patience_s: float = _PATIENCE_S,
        skip_bad: bool = False,
        skipped: Mapping[int, str] | None = None,
    ) -> None:
        """Starts nothing yet; the workers start with the iteration.

        Args:
            load_batch: makes the batch of these rows; several at once.
            order: which rows come when.
            batch_size: of all processes together; each takes a contiguous slice of it.
            process_index, process_count: which slice.
            num_workers: 0 makes each batch when it is asked for, in the caller's thread.
            prefetch_batches: batches being made or kept ready, at least as many as workers.
            start_sample: position to start from, `next_sample` of the last batch when resuming.
            start_pool: starts the workers: ThreadPool or ProcessPool.
            describe: names rows to a person, for messages; None gives their numbers.
            skip_bad: go on without samples for which load_batch raises BadSample.
            skipped: rows left out from the start: `skipped` of the run that is resumed.
            patience_s: a batch that takes longer is named in the log.

        Raises:
            UserError: the batch does not divide over the processes, or is larger than the dataset.
        """
        if batch_size % process_count:
            lower, upper = batch_size // process_count * process_count, -(-batch_size // process_count) * process_count
            choice = f"{lower} or {upper}" if lower else f"{upper}"
            raise UserError(f"--batch-size {batch_size} does not divide over {process_count} processes. Take {choice}.")
        num_rows = order.num_rows
        if batch_size > num_rows:
            largest = num_rows // process_count * process_count
            advice = f"Take --batch-size={largest} or less" if largest else "Use fewer processes"
            raise UserError(
                f"--batch-size {batch_size} is more than the {num_rows} frames of the dataset, so a batch would hold "
                f"the same frame twice. {advice}, or record more data."
            )
        self._load_batch, self._batch_size = load_batch, batch_size
        share = batch_size // process_count
        self._slice = slice(process_index * share, (process_index + 1) * share)
        self._order = order
        self._num_workers, self._ahead = num_workers, max(prefetch_batches, num_workers, 1)
        self._next = start_sample
        self._start_pool, self._describe, self._patience_s = start_pool, describe or _row_numbers, patience_s
        self._pool: WorkerPool[T] | None = None
        self._skip_bad, self.skipped = skip_bad, dict(skipped or {})
        self._pending: collections.deque[tuple[int, concurrent.futures.Future[T]]] = collections.deque()

    def __iter__(self) -> Iterator[LoadedBatch[T]]:
        return self

    def __next__(self) -> LoadedBatch[T]:
        """The next batch; waits for it if it is not ready.

        Raises:
            Whatever `load_batch` raised, with the batch's rows added. The position stays at that batch.
            WorkerDied: a worker's process ended by itself.
        """
        if self._num_workers and self._pool is None:
            self._pool = self._start_pool(self._load_batch, self._num_workers)
        first, future = self._next, None
        if self._pool is not None:
            while len(self._pending) < self._ahead:
                self._submit(self._pool)
            first, future = self._pending[0]
        while True:
            try:
                batch = self._load_batch(self._share(first)) if future is None else self._wait(future, first)
                break
            except BadSample as error:
                if not self._skip_bad:
                    self.close()
                    raise
                self.skipped[error.row] = str(error)
                _log.warning("left out, sample %d of %d: %s", len(self.skipped), self._order.num_rows, error)
                if self._pool is not None:
                    future = self._pool.submit(self._share(first))
            except Exception as error:
                self.close()
                raise self._explained(error, first) from error.__cause__
            except BaseException:
                self.close()
                raise
        self._next = first + self._batch_size
        if self._pool is not None:
            self._pending.popleft()
            self._submit(self._pool)  # now, so that workers go on while the caller computes
        return LoadedBatch(batch, self._order.rows(first, self._batch_size), self._next)

    def close(self) -> None:
        """Gives up batches not yet taken and waits until the workers have ended. Iterating again starts anew there."""
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> "Loader[T]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _share(self, first: int) -> np.ndarray:
        """This process's rows of the batch that begins with sample `first`."""
        return self._order.rows(first + self._slice.start, self._slice.stop - self._slice.start, self.skipped)

    def _submit(self, pool: WorkerPool[T]) -> None:
        first = self._pending[-1][0] + self._batch_size if self._pending else self._next
        self._pending.append((first, pool.submit(self._share(first))))

    def _wait(self, future: concurrent.futures.Future[T], first: int) -> T:
        waited_s = 0.0
        while not concurrent.futures.wait([future], timeout=self._patience_s).done:
            waited_s += self._patience_s
            _log.warning("waiting for %.0f s %s", waited_s, self._where(first))
        return future.result()

    def _where(self, first: int) -> str:
        last = first + self._batch_size - 1
        return f"while loading the batch of samples {first} to {last} ({self._describe(self._share(first))})"

    def _explained(self, error: Exception, first: int) -> Exception:
        if isinstance(error, WorkerDied):
            return WorkerDied(f"{error} This happened {self._where(first)}.")
        if not isinstance(error, UserError):  # whose text is for the user and names dataset, episode and frame
            error.add_note(self._where(first))
        return error


def _row_numbers(rows: np.ndarray) -> str:
    shown = ", ".join(map(str, rows[:_MAX_NAMED].tolist())) + (", …" if len(rows) > _MAX_NAMED else "")
    return f"dataset row{'s' if len(rows) > 1 else ''} {shown}"
