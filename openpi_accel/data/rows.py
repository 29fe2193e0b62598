"""Rows of a dataset: which ones belong to an episode, and how to name them to a person.

Letters: N dataset rows, D dimensions of a column.
"""

import json
import pathlib
from collections.abc import Sequence

import numpy as np

from openpi_accel.data.lerobot.dataset import LeRobotDataset
from openpi_accel.errors import UserError

_MAX_NAMED = 5
_HOLD_OUT = 0x76616C  # sets this random stream apart from the sample order's


def numeric_column(dataset: LeRobotDataset, key: str) -> np.ndarray:
    """A column as N D; LeRobot stores a feature of one dimension without its axis."""
    return dataset.column(key).reshape(dataset.num_frames, -1)


def rows_of_episodes(dataset: LeRobotDataset, episodes: Sequence[int] | None) -> np.ndarray:
    """The dataset rows of these episodes (by the dataset's own numbers), ascending; all rows for None.

    Raises:
        UserError: an episode that does not exist, or none at all.
    """
    if episodes is None:
        return np.arange(dataset.num_frames)
    positions = {int(number): position for position, number in enumerate(dataset.episode_ids)}
    missing = [number for number in episodes if number not in positions]
    if missing or not episodes:
        what = f"episode {missing[0]}" if missing else "no episode at all"
        raise UserError(
            f"--data.episodes asks for {what}; {dataset.root} has {len(positions)} episodes, {min(positions)} to "
            f"{max(positions)}."
        )
    starts = dataset.episode_starts
    chosen = sorted({positions[number] for number in episodes})
    rows = np.concatenate([np.arange(starts[position], starts[position + 1]) for position in chosen])
    if not len(rows):
        raise UserError(f"--data.episodes chooses episodes of {dataset.root} without any frame. Choose others.")
    return rows


def training_rows(dataset: LeRobotDataset, episodes: Sequence[int] | None, keep_frames: str | None) -> np.ndarray:
    """The rows at which training's chunks start, ascending.

    Args:
        dataset: where they are.
        episodes: by the dataset's own numbers; None is all.
        keep_frames: JSON file, episode number -> list of [first, last + 1] frames that are kept; None keeps all.

    Raises:
        UserError: an episode that does not exist, a file that does not say what it should, or no row left.
    """
    rows = rows_of_episodes(dataset, episodes)
    if keep_frames is None:
        return rows
    keep = np.ones(dataset.num_frames, bool)
    for episode, ranges in _read_ranges(pathlib.Path(keep_frames).expanduser()).items():
        if episode not in dataset.episode_ids:
            raise UserError(f"{keep_frames} names episode {episode}, which {dataset.root} does not have.")
        whole = rows_of_episodes(dataset, [episode])
        keep[whole] = False
        for start, stop in ranges:
            if not 0 <= start < stop <= len(whole):
                raise UserError(
                    f"{keep_frames}: episode {episode} has frames 0 to {len(whole) - 1}, so [{start}, {stop}] is no "
                    "range of it. A range is [first, last + 1]."
                )
            keep[whole[start:stop]] = True
    rows = rows[keep[rows]]
    if not len(rows):
        raise UserError(f"{keep_frames} keeps none of the chosen frames of {dataset.root}.")
    return rows


def _read_ranges(path: pathlib.Path) -> dict[int, list[tuple[int, int]]]:
    try:
        content = json.loads(path.read_text())
        return {int(episode): [(_whole(a), _whole(b)) for a, b in ranges] for episode, ranges in content.items()}
    except OSError as error:
        raise UserError(f"--data.keep-frames: {path} could not be read: {error.strerror}.") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f'{path} is no list of frames. It should be JSON such as {{"3": [[0, 120], [200, 340]]}}: episode number, '
            f"then ranges [first, last + 1]. ({error})"
        ) from error


def _whole(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{number!r} is no frame number")
    return number


def hold_out(dataset: LeRobotDataset, rows: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divides rows by whole episodes: those to train on, and those held out. A function of (rows' episodes, seed).

    Args:
        rows: ascending.
        fraction: of the episodes; at least one is held out where it is above 0.
        seed: which ones.

    Raises:
        UserError: no episode would be left to train on.
    """
    if not fraction:
        return rows, rows[:0]
    episodes = dataset.episode_of(rows)
    numbers = np.unique(episodes)
    count = max(1, round(fraction * len(numbers)))
    if count >= len(numbers):
        raise UserError(
            f"--data.val-fraction={fraction} holds out {count} of {len(numbers)} episodes, and none is left to train "
            "on. Give a smaller fraction, or more episodes."
        )
    # Raw Philox output, as in the sample order: guaranteed to stay the same in future releases of numpy.
    bits = np.random.Philox(np.random.SeedSequence([seed, _HOLD_OUT])).random_raw(dataset.num_episodes)
    held_out = np.isin(episodes, numbers[np.argsort(bits[numbers], kind="stable")[:count]])
    return rows[~held_out], rows[held_out]


def last_row_of_episode(episode_starts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """For each row, the last row of its episode. `episode_starts` ends with N."""
    return episode_starts[np.searchsorted(episode_starts, rows, side="right")] - 1


def name_rows(dataset: LeRobotDataset, rows: np.ndarray) -> str:
    """`episode 3 frame 17, episode 4 frame 0 and 12 more`."""
    positions = dataset.episode_of(rows[:_MAX_NAMED])
    frames = rows[:_MAX_NAMED] - dataset.episode_starts[positions]
    episodes = dataset.episode_ids[positions]
    named = [f"episode {episode} frame {frame}" for episode, frame in zip(episodes, frames, strict=True)]
    more = len(rows) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def require_finite(dataset: LeRobotDataset, key: str, rows: np.ndarray) -> None:
    """Refuses NaN and infinity in these rows of a column.

    Raises:
        UserError: names the dataset, the column, the episodes and frames.
    """
    values = numeric_column(dataset, key)[rows]
    if np.isfinite(values).all():
        return
    bad = rows[~np.isfinite(values).all(axis=1)]
    num_episodes = len(np.unique(dataset.episode_of(bad)))
    raise UserError(
        f"{dataset.root}: column {key!r} holds NaN or infinity in {len(bad)} frames: {name_rows(dataset, bad)}. "
        f"Mend the data, or leave {'this episode' if num_episodes == 1 else f'these {num_episodes} episodes'} out by "
        "listing the good ones with --data.episodes."
    )


def reached_rows(episode_starts: np.ndarray, rows: np.ndarray, horizon: int) -> np.ndarray:
    """The rows that chunks of `horizon` steps starting at `rows` hold, ascending, each once."""
    ends = last_row_of_episode(episode_starts, rows) + 1
    num_rows = int(episode_starts[-1])
    opened = np.bincount(rows, minlength=num_rows + 1)
    closed = np.bincount(np.minimum(rows + horizon, ends), minlength=num_rows + 1)
    return np.flatnonzero(np.cumsum(opened - closed)[:num_rows] > 0)
