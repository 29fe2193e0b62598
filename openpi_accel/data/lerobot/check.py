"""Reads everything in a dataset and names what is wrong."""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from openpi_accel.data.lerobot.dataset import LeRobotDataset
from openpi_accel.data.lerobot.frames import FrameError
from openpi_accel.errors import UserError

_FRAMES_PER_READ = 64


@dataclasses.dataclass(frozen=True)
class Problem:
    """One fault.

    Attributes:
        episode, frame, row: where; None if a whole column cannot be read. Episode is the dataset's own number.
        source: the camera or column.
        problem: what is wrong.
    """

    episode: int | None
    frame: int | None
    row: int | None
    source: str
    problem: str


def check_columns(dataset: LeRobotDataset) -> list[Problem]:
    """Numeric columns: unreadable, NaN or infinite, frames out of their order, tasks without text."""
    problems: list[Problem] = []

    def at(rows: np.ndarray, source: str, problem: str) -> None:
        problems.extend(_problem(dataset, row, source, problem) for row in rows.tolist())

    columns: dict[str, np.ndarray] = {}
    for key in dataset.features:
        if key in dataset.cameras:
            continue
        try:
            columns[key] = dataset.column(key)
        except UserError as error:
            problems.append(Problem(None, None, None, key, str(error)))
            continue
        if np.issubdtype(columns[key].dtype, np.floating):
            finite = np.isfinite(columns[key].reshape(dataset.num_frames, -1)).all(axis=1)
            at(np.flatnonzero(~finite), key, "holds NaN or infinity")
    rows = np.arange(dataset.num_frames)
    episodes = dataset.episode_of(rows)
    expected = {
        "frame_index": rows - dataset.episode_starts[episodes],
        "episode_index": dataset.episode_ids[episodes],
    }
    for key, values in expected.items():
        if key in columns:
            at(np.flatnonzero(columns[key] != values), key, f"is not the {key.split('_')[0]}'s own number")
    if "task_index" in columns:
        with_text = [number for number, text in dataset.tasks.items() if text.strip()]
        at(np.flatnonzero(~np.isin(columns["task_index"], with_text)), "task_index", "has no task text")
    return problems


def check_frames(
    dataset: LeRobotDataset, num_workers: int = 2, on_read: Callable[[int], None] = lambda count: None
) -> list[Problem]:
    """Decodes every frame of every camera.

    Args:
        dataset: what to read.
        num_workers: threads.
        on_read: called with the number of frames just read.

    Returns:
        Frames that cannot be read, or have another size than info.json declares (then only the camera's first) or than
        the camera's first frame has; in the order of cameras and rows.
    """
    problems = []
    with concurrent.futures.ThreadPoolExecutor(num_workers) as executor:
        for camera in dataset.cameras:
            declared = (dataset.cameras[camera].height, dataset.cameras[camera].width)
            expected: tuple[int, int] | None = None
            reads = executor.map(lambda rows, camera=camera: _read(dataset, camera, rows), _reads(dataset))
            for sizes, faults in reads:
                problems += faults
                for row, size in sizes.items():
                    if expected is None and size != declared:
                        problem = f"is {size[0]} x {size[1]}, info.json declares {declared[0]} x {declared[1]}"
                        problems.append(_problem(dataset, row, camera, problem))
                    elif expected is not None and size != expected:
                        problem = f"is {size[0]} x {size[1]}, the camera's first frame {expected[0]} x {expected[1]}"
                        problems.append(_problem(dataset, row, camera, problem))
                    expected = expected or size
                on_read(len(sizes) + len(faults))
    return problems


def _reads(dataset: LeRobotDataset) -> Iterator[np.ndarray]:
    """Rows of one episode, a few at a time."""
    for start, stop in zip(dataset.episode_starts[:-1].tolist(), dataset.episode_starts[1:].tolist(), strict=True):
        for first in range(start, stop, _FRAMES_PER_READ):
            yield np.arange(first, min(first + _FRAMES_PER_READ, stop))


def _read(dataset: LeRobotDataset, camera: str, rows: np.ndarray) -> tuple[dict[int, tuple[int, int]], list[Problem]]:
    """Row -> height and width, and the rows that cannot be read."""
    try:
        frames = dataset.frames(camera, rows)
        return {row: frame.shape[:2] for row, frame in zip(rows.tolist(), frames, strict=True)}, []
    except FrameError:
        pass  # again, one by one
    sizes, problems = {}, []
    for row in rows.tolist():
        try:
            sizes[row] = dataset.frames(camera, np.array([row]))[0].shape[:2]
        except FrameError as error:
            problems.append(Problem(error.episode, error.frame, row, camera, error.why))
    return sizes, problems


def _problem(dataset: LeRobotDataset, row: int, source: str, problem: str) -> Problem:
    episode = int(dataset.episode_of(np.array([row]))[0])
    frame = row - int(dataset.episode_starts[episode])
    return Problem(int(dataset.episode_ids[episode]), frame, row, source, problem)
