"""The index that every format version is read into: which rows are which episode, and where their files are."""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from openpi_accel.data.lerobot.features import Info
from openpi_accel.errors import UserError

INDEX = "the dataset's index"  # as a Track is told


@dataclasses.dataclass(frozen=True)
class Clips:
    """Where one camera's video is.

    Attributes:
        files: the video files.
        file_of: (num_episodes,) number of the file that holds the episode.
        from_s: (num_episodes,) seconds from the file's first frame to the episode's first frame, as declared.
    """

    files: list[pathlib.Path]
    file_of: np.ndarray
    from_s: np.ndarray


@dataclasses.dataclass(frozen=True)
class Index:
    """Rows are numbered through the data files in their order; an episode's rows follow each other.

    Attributes:
        info: what `meta/info.json` says.
        tasks: task_index -> text.
        episode_ids: (num_episodes,) the dataset's own numbers, in the order of the rows.
        episode_starts: (num_episodes + 1,) first row of each episode, then the number of rows.
        data_files: the parquet files.
        data_starts: (num_files + 1,) first row of each file, then the number of rows.
        clips: video camera -> where its frames are.
    """

    info: Info
    tasks: dict[int, str]
    episode_ids: np.ndarray
    episode_starts: np.ndarray
    data_files: list[pathlib.Path]
    data_starts: np.ndarray
    clips: dict[str, Clips]


class Track(Protocol):
    """Follows a loop over files, to show how far it is."""

    def __call__[T](self, items: Sequence[T], what: str) -> Iterable[T]:
        """The items, one after the other; `what` is being read, for people."""


def untracked[T](items: Sequence[T], what: str) -> Iterable[T]:
    """A Track that shows nothing."""
    return items


def starts(lengths: list[int] | np.ndarray) -> np.ndarray:
    """First number of each run, then the total: (len(lengths) + 1,) int64."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def fill_template(info: Info, name: str, template: str | None, **values: int | str) -> str:
    """A file's path from the template `name` of info.json.

    Raises:
        UserError: there is no template, or it asks for something that this version does not define.
    """
    if not isinstance(template, str):
        raise UserError(f"{info.path} has no {name}, but the dataset needs one. Fetch the dataset again.")
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"{info.path}: {name} is {template!r}, which cannot be filled in for {info.version} ({error}; known are "
            f"{', '.join(values)})."
        ) from error


def check_totals(info: Info, num_episodes: int, num_frames: int, source: pathlib.Path) -> None:
    """Compares with the totals that info.json declares.

    Raises:
        UserError: they disagree, or there is nothing in the dataset.
    """
    if num_episodes == 0 or num_frames == 0:
        raise UserError(f"{source} lists no frames: the dataset is empty. Record or fetch at least one episode.")
    for what, declared, found in (
        ("total_episodes", info.total_episodes, num_episodes),
        ("total_frames", info.total_frames, num_frames),
    ):
        if declared is not None and declared != found:
            raise UserError(
                f"{info.path} declares {what} {declared}, but {source} lists {found}: the dataset is not complete or "
                f"was edited by hand. Fetch it again, or correct {what} in info.json if the files are as you want them."
            )


def task_table(pairs: Iterable[tuple[int, object]], path: pathlib.Path) -> dict[int, str]:
    """Task number -> text; a missing text becomes an empty one, which is refused where a frame uses it.

    Raises:
        UserError: one number with two texts.
    """
    tasks: dict[int, str] = {}
    for number, text in pairs:
        text = "" if text is None else str(text)
        if tasks.setdefault(number, text) != text:
            raise UserError(
                f"{path} gives task {number} two texts, {tasks[number]!r} and {text!r}, so the prompts of its frames "
                "are not known. Remove the wrong one."
            )
    return tasks
