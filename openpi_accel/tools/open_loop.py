"""Open-loop error: predicted action chunks against the recorded ones, beside what needs no policy at all.

Letters: N frames, A action horizon, D unpadded action dimensions.
"""

import dataclasses
from typing import Any

import numpy as np

from openpi_accel.data.lerobot.dataset import LeRobotDataset
from openpi_accel.data.rows import numeric_column


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenLoopErrors:
    """Mean absolute errors in the dataset's units, over the recorded steps of the chunks without end repeats.

    Attributes:
        per_dim: method -> D, over all steps of the chunk.
        per_step: method -> A D; NaN for a step that no frame's episode reaches.
        num_frames: N.
        num_values: recorded steps that were compared.
    """

    per_dim: dict[str, np.ndarray]
    per_step: dict[str, np.ndarray]
    num_frames: int
    num_values: int

    def relative(self, method: str = "policy", to: str = "mean action") -> float:
        """Error of a method over that of another, averaged over the dimensions that move; below 1 is better."""
        moves = self.per_dim[to] > 0
        return float(np.mean(self.per_dim[method][moves] / self.per_dim[to][moves])) if moves.any() else float("nan")

    def relative_per_step(self, method: str = "policy", to: str = "mean action") -> np.ndarray:
        """As `relative`, A: for each step of the chunk, over the error of `to` averaged over all steps."""
        moves = self.per_dim[to] > 0
        return np.mean(self.per_step[method][:, moves] / self.per_dim[to][moves], axis=1)

    def as_json(self) -> dict[str, Any]:
        """Plain values; NaN becomes None."""
        return {
            "num_frames": self.num_frames,
            "num_values": self.num_values,
            "mean_absolute_error": {
                method: {"per_dim": _plain(self.per_dim[method]), "per_step_and_dim": _plain(self.per_step[method])}
                for method in self.per_dim
            },
            "relative_to_mean_action": {method: _number(self.relative(method)) for method in self.per_dim},
        }


def open_loop_errors(recorded: np.ndarray, is_pad: np.ndarray, predictions: dict[str, np.ndarray]) -> OpenLoopErrors:
    """Compares chunks.

    Args:
        recorded: N A D.
        is_pad: N A, True where the episode had ended and the last action repeats.
        predictions: method -> N A D.
    """
    counts = ~is_pad[..., None]  # N A 1
    steps = np.sum(counts, axis=0)  # A 1
    errors = {method: np.where(counts, np.abs(chunks - recorded), 0.0) for method, chunks in predictions.items()}
    return OpenLoopErrors(
        per_dim={method: error.sum((0, 1)) / steps.sum() for method, error in errors.items()},
        per_step={
            method: np.where(steps > 0, error.sum(0) / np.maximum(steps, 1), np.nan) for method, error in errors.items()
        },
        num_frames=len(recorded),
        num_values=int(steps.sum()),
    )


def last_action(dataset: LeRobotDataset, key: str, rows: np.ndarray, at_start: np.ndarray) -> np.ndarray:
    """N D: the action recorded one frame before each row; where an episode begins, `at_start` (N D)."""
    begins = rows == dataset.episode_starts[dataset.episode_of(rows)]
    before = numeric_column(dataset, key)[np.maximum(rows - 1, 0)]
    return np.where(begins[:, None], at_start, before)


def spread_rows(rows: np.ndarray, count: int | None) -> np.ndarray:
    """`count` of the rows, evenly spaced; all of them for None or where there are fewer."""
    if count is None or count >= len(rows):
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]


def _plain(values: np.ndarray) -> list[Any]:
    """Nested lists with None for NaN, which JSON does not have."""
    return np.where(np.isfinite(values), values, np.array(None)).tolist()


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
