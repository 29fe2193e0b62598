"""Exact statistics over the chunks of a dataset, without holding the chunks of all dimensions at once.

Letters: N dataset rows, F chosen rows (frames), A action horizon, D dimensions.
"""

import concurrent.futures
import hashlib
from collections.abc import Callable

import numpy as np

from openpi_accel.data.norm_stats import Statistics
from openpi_accel.data.rows import last_row_of_episode

_QUANTILES = (0.01, 0.99)
_Moments = tuple[float, float, float, float]


def weighted_moments(values: np.ndarray, weights: np.ndarray) -> _Moments:
    """Mean, std, q01, q99 of the multiset that holds values[i] weights[i] times.

    Equal to `np.quantile(np.repeat(values, weights), q)` with numpy's linear rule (Hyndman and Fan 1996, type 7),
    without the repetition. The variance takes two passes in float64, so that data far from zero keeps its spread.

    Args:
        values: N, any real dtype, finite.
        weights: N non-negative integers, at least one positive.
    """
    kept = weights > 0
    values, weights = values[kept].astype(np.float64), weights[kept]
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    ends = np.cumsum(weights)
    total = int(ends[-1])
    mean = float(np.dot(values, weights) / total)
    std = float(np.sqrt(np.dot(np.square(values - mean), weights) / total))
    low, high = (
        _between(lambda rank: float(values[np.searchsorted(ends, rank, side="right")]), q, total) for q in _QUANTILES
    )
    return mean, std, low, high


def moments(values: np.ndarray) -> _Moments:
    """Mean, std, q01, q99 of all entries; sorts `values` in place."""
    values = values.reshape(-1)
    mean = float(values.mean(dtype=np.float64))
    deviation = np.subtract(values, mean, dtype=np.float64)
    std = float(np.sqrt(np.dot(deviation, deviation) / values.size))
    ranks = sorted({rank for q in _QUANTILES for rank in _neighbours(q, values.size)})
    values.partition(ranks)
    low, high = (_between(lambda rank: float(values[rank]), q, values.size) for q in _QUANTILES)
    return mean, std, low, high


def state_statistics(state: np.ndarray, rows: np.ndarray, *, on_done: Callable[[], None] = lambda: None) -> Statistics:
    """Over the chosen frames.

    Args:
        state: N D.
        rows: F dataset rows.
        on_done: called after each dimension.
    """
    result = []
    for column in state.T:
        result.append(moments(column[rows].copy()))
        on_done()
    return _stack(result)


def action_statistics(
    actions: np.ndarray,
    state: np.ndarray,
    rows: np.ndarray,
    episode_starts: np.ndarray,
    *,
    horizon: int,
    delta_dims: int,
    num_threads: int = 1,
    on_done: Callable[[], None] = lambda: None,
) -> Statistics:
    """Over the A-step chunks that start at the chosen frames; past an episode's end its last action counts again.

    Absolute dimensions: every row counts as often as chunks hold it, so only N weights are kept. Delta dimensions
    (action minus the state at the chunk's start): F x A values of one dimension at a time and thread.

    Args:
        actions: N D.
        state: N D', unnormalised.
        rows: F dataset rows.
        episode_starts: num_episodes + 1.
        horizon: A.
        delta_dims: leading action dimensions that are relative to the state.
        num_threads: dimensions worked on at once (sorting leaves the interpreter lock).
        on_done: called after each dimension.
    """
    last = last_row_of_episode(episode_starts, rows)
    weights = np.zeros(len(actions), np.int64)
    for step in range(horizon):
        weights += np.bincount(np.minimum(rows + step, last), minlength=len(actions))

    def of_dimension(dim: int) -> _Moments:
        if dim >= delta_dims:
            return weighted_moments(actions[:, dim], weights)
        column, start = np.ascontiguousarray(actions[:, dim]), state[rows, dim]
        deltas = np.empty((horizon, len(rows)), np.result_type(actions, state))
        for step in range(horizon):
            # In the data's own dtype, as the host transform subtracts.
            np.subtract(column[np.minimum(rows + step, last)], start, out=deltas[step])
        return moments(deltas)

    result = []
    with concurrent.futures.ThreadPoolExecutor(max(1, num_threads)) as pool:
        for of_one in pool.map(of_dimension, range(actions.shape[1])):
            result.append(of_one)
            on_done()
    return _stack(result)


def fingerprint(state: np.ndarray, actions: np.ndarray) -> str:
    """Hash of the numeric columns: tells whether statistics belong to this state of the data."""
    digest = hashlib.sha256()
    for column in (state, actions):
        digest.update(str(column.shape).encode())
        digest.update(np.ascontiguousarray(column, np.float32).data)
    return digest.hexdigest()[:16]


def _neighbours(q: float, total: int) -> tuple[int, int]:
    rank = int(np.floor(q * (total - 1)))
    return rank, min(rank + 1, total - 1)


def _between(value_at: Callable[[int], float], q: float, total: int) -> float:
    """Interpolates as numpy does: from the nearer end, so that rounding agrees to the bit."""
    lower, upper = _neighbours(q, total)
    a, b = value_at(lower), value_at(upper)
    share = q * (total - 1) - lower
    return b - (b - a) * (1 - share) if share >= 0.5 else a + (b - a) * share


def _stack(result: list[_Moments]) -> Statistics:
    mean, std, q01, q99 = np.asarray(result, np.float64).T
    return Statistics(mean=mean, std=std, q01=q01, q99=q99)
