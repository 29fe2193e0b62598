"""Format v3.0: many episodes per parquet file and per video, meta in parquet."""

import contextlib
import itertools
import pathlib

import numpy as np
import pyarrow as pa

from openpi_accel.data.lerobot.features import Info
from openpi_accel.data.lerobot.index import (
    INDEX,
    Clips,
    Index,
    Track,
    check_totals,
    fill_template,
    starts,
    task_table,
    untracked,
)
from openpi_accel.data.lerobot.parquet import explained, open_parquet, read_column
from openpi_accel.errors import UserError

VERSIONS = ("v3.0",)
# tasks.parquet keeps the text in the index of a data frame; its name was empty in early 0.4 releases of lerobot.
_TASK_COLUMNS = ("task", "__index_level_0__", "tasks")


def read_index(root: pathlib.Path, info: Info, track: Track = untracked) -> Index:
    """Reads `meta/episodes/`, `meta/tasks.parquet` and the data files' episode_index column.

    Rows follow the data files (as in lerobot's own reader), whatever the order of the episodes in them.

    Raises:
        UserError: a file is missing or damaged, or counts disagree; names the file.
    """
    folder = root / "meta" / "episodes"
    episodes = _read_episodes(folder)
    length_of = dict(zip(episodes["episode_index"].tolist(), episodes["length"].tolist(), strict=True))
    if len(length_of) != len(episodes["episode_index"]):
        listed, counts = np.unique(episodes["episode_index"], return_counts=True)
        raise UserError(f"{folder} lists episode {listed[counts > 1][0]} twice. Fetch the dataset again.")
    check_totals(info, len(length_of), sum(length_of.values()), folder)

    places = np.stack([episodes["data/chunk_index"], episodes["data/file_index"]], axis=1)
    data_files: list[pathlib.Path] = []
    data_lengths: list[int] = []
    ids: list[int] = []
    for chunk, number in track(np.unique(places, axis=0).tolist(), INDEX):
        name = fill_template(info, "data_path", info.data_path, chunk_index=chunk, file_index=number)
        file = root / name
        with contextlib.closing(open_parquet(file)) as opened:
            num_rows = opened.metadata.num_rows
        found = _runs(file, read_column(file, "episode_index", num_rows))
        expected = set(episodes["episode_index"][(places == (chunk, number)).all(axis=1)].tolist())
        for episode, length in found:
            if episode not in expected or length != length_of[episode]:
                said = length_of[episode] if episode in expected else "none"
                raise UserError(
                    f"{file} holds {length} rows of episode {episode}, but {folder} says {said}. "
                    "Fetch the dataset again."
                )
        if missing := sorted(expected - {episode for episode, _ in found}):
            raise UserError(
                f"{file} lacks episode {missing[0]}, which {folder} says is in it. Fetch the dataset again."
            )
        data_files.append(file)
        data_lengths.append(num_rows)
        ids += [episode for episode, _ in found]

    # From the order of the meta files to the order of the rows.
    row_of = {episode: row for row, episode in enumerate(episodes["episode_index"].tolist())}
    order = np.array([row_of[episode] for episode in ids])
    return Index(
        info=info,
        tasks=_read_tasks(root / "meta" / "tasks.parquet"),
        episode_ids=np.array(ids, np.int64),
        episode_starts=starts([length_of[episode] for episode in ids]),
        data_files=data_files,
        data_starts=starts(data_lengths),
        clips={
            key: _read_clips(root, info, folder, key, episodes, order)
            for key, camera in info.cameras.items()
            if camera.kind == "video"
        },
    )


def _read_episodes(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The columns of all files in `meta/episodes`, but texts and statistics."""
    files = sorted(folder.glob("*/*.parquet"))
    if not files:
        raise UserError(f"{folder} holds no parquet files: the dataset is not complete. Fetch it again.")
    parts: list[dict[str, np.ndarray]] = []
    for path in files:
        with contextlib.closing(open_parquet(path)) as file, explained(path):
            names = [
                field.name
                for field in file.schema_arrow
                if field.name in ("episode_index", "length") or field.name.startswith(("data/", "videos/"))
            ]
            table = file.read(columns=names, use_threads=False)
        needed = ("episode_index", "length", "data/chunk_index", "data/file_index")
        if lacking := [name for name in needed if name not in names]:
            raise UserError(f"{path} has no column {lacking[0]!r}. Fetch the dataset again.")
        parts.append({name: table.column(name).to_numpy() for name in names})
    shared = set.intersection(*(set(part) for part in parts))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name in shared}


def _runs(file: pathlib.Path, episode_index: np.ndarray) -> list[tuple[int, int]]:
    """(episode, number of rows) in the order of the file."""
    if not len(episode_index):
        return []
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(episode_index)) + 1, [len(episode_index)]])
    runs = [(int(episode_index[a]), int(b - a)) for a, b in itertools.pairwise(bounds)]
    seen = [episode for episode, _ in runs]
    if len(set(seen)) != len(seen):
        twice = next(episode for episode in seen if seen.count(episode) > 1)
        raise UserError(
            f"{file}: the rows of episode {twice} are not next to each other. Rewrite the file sorted by episode."
        )
    return runs


def _read_clips(
    root: pathlib.Path, info: Info, folder: pathlib.Path, key: str, episodes: dict[str, np.ndarray], order: np.ndarray
) -> Clips:
    columns = [f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
    if lacking := [name for name in columns if name not in episodes]:
        raise UserError(
            f"{folder} has no column {lacking[0]!r}, but {info.path} lists the video camera {key!r}. "
            "Fetch the dataset again."
        )
    chunk, number, from_s = (episodes[name][order] for name in columns)
    if (
        np.isnan(chunk.astype(float)).any()
        or np.isnan(number.astype(float)).any()
        or np.isnan(from_s.astype(float)).any()
    ):
        raise UserError(f"{folder}: some episodes have no video of camera {key!r}. Fetch the dataset again.")
    places, file_of = np.unique(np.stack([chunk, number], axis=1).astype(np.int64), axis=0, return_inverse=True)
    files = [
        root / fill_template(info, "video_path", info.video_path, video_key=key, chunk_index=c, file_index=f)
        for c, f in places.tolist()
    ]
    return Clips(files=files, file_of=file_of.reshape(-1), from_s=from_s.astype(np.float64))


def _read_tasks(path: pathlib.Path) -> dict[int, str]:
    with contextlib.closing(open_parquet(path)) as file, explained(path):
        table: pa.Table = file.read(use_threads=False)
    text = next((name for name in _TASK_COLUMNS if name in table.column_names), None)
    if text is None or "task_index" not in table.column_names:
        raise UserError(f"{path} has the columns {', '.join(table.column_names)}; it needs task_index and task.")
    return task_table(zip(table.column("task_index").to_pylist(), table.column(text).to_pylist(), strict=True), path)
