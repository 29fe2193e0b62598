"""Format v2.0 and v2.1: one parquet file and one video per episode and camera, meta in JSON lines.

The two differ only in where statistics are kept, and those are not read: ours are computed from all frames.
"""

import contextlib
import pathlib

import numpy as np

from openpi_accel.data.lerobot.features import Info, read_jsonl
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
from openpi_accel.data.lerobot.parquet import open_parquet
from openpi_accel.errors import UserError

VERSIONS = ("v2.0", "v2.1")


def read_index(root: pathlib.Path, info: Info, track: Track = untracked) -> Index:
    """Reads `meta/episodes.jsonl`, `meta/tasks.jsonl` and the footers of the parquet files.

    Raises:
        UserError: a file is missing or damaged, or counts disagree; names the file.
    """
    episodes_path = root / "meta" / "episodes.jsonl"
    lengths_of: dict[int, int] = {}
    for row in read_jsonl(episodes_path):
        try:
            episode, length = int(row["episode_index"]), int(row["length"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{episodes_path}: an entry lacks episode_index or length ({row!r}).") from error
        if episode in lengths_of:
            raise UserError(f"{episodes_path} lists episode {episode} twice. Remove one of the lines.")
        lengths_of[episode] = length
    ids = sorted(lengths_of)
    lengths = [lengths_of[episode] for episode in ids]
    check_totals(info, len(ids), sum(lengths), episodes_path)
    chunks_size = info.raw.get("chunks_size") or 1000

    def path(name: str, template: str | None, episode: int, key: str = "") -> pathlib.Path:
        chunk = episode // chunks_size
        return root / fill_template(info, name, template, episode_chunk=chunk, episode_index=episode, video_key=key)

    data_files = [path("data_path", info.data_path, episode) for episode in ids]
    for file, length in track(list(zip(data_files, lengths, strict=True)), INDEX):
        with contextlib.closing(open_parquet(file)) as opened:
            num_rows = opened.metadata.num_rows
        if num_rows != length:
            raise UserError(
                f"{file} has {num_rows} rows, but {episodes_path} says {length}: one of them is from another version "
                "of the dataset. Fetch it again."
            )
    clips = {
        key: Clips(
            files=[path("video_path", info.video_path, episode, key) for episode in ids],
            file_of=np.arange(len(ids)),
            from_s=np.zeros(len(ids)),
        )
        for key, camera in info.cameras.items()
        if camera.kind == "video"
    }
    return Index(
        info=info,
        tasks=_read_tasks(root / "meta" / "tasks.jsonl"),
        episode_ids=np.array(ids, np.int64),
        episode_starts=starts(lengths),
        data_files=data_files,
        data_starts=starts(lengths),
        clips=clips,
    )


def _read_tasks(path: pathlib.Path) -> dict[int, str]:
    pairs = []
    for row in read_jsonl(path):
        try:
            pairs.append((int(row["task_index"]), row["task"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: an entry lacks task_index or task ({row!r}).") from error
    return task_table(pairs, path)
