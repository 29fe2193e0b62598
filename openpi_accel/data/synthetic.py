"""Writes the drawn task of `synthetic_scene` as a LeRobot v3.0 dataset: several episodes per file, PNG cameras.

Format facts: github.com/huggingface/lerobot, dataset v3.0 (data/, meta/episodes/, meta/tasks.parquet, meta/info.json,
meta/stats.json). Equal settings give equal bytes.
"""

import dataclasses
import functools
import io
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from openpi_accel.data.synthetic_scene import ACTION_NAMES, FPS, STATE_NAMES, TASKS, Episode, make_episode
from openpi_accel.errors import UserError

CAMERAS = ("observation.images.base", "observation.images.wrist")
_INTEGER_COLUMNS = ("frame_index", "episode_index", "index", "task_index")
_EPISODES_PER_FILE = 50
_DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_Of = Callable[[np.ndarray], np.ndarray]
_STATISTICS: dict[str, _Of] = {
    "min": lambda x: x.min(0),
    "max": lambda x: x.max(0),
    "mean": lambda x: x.mean(0),
    "std": lambda x: x.std(0),
    **{f"q{percent:02d}": functools.partial(np.quantile, q=percent / 100, axis=0) for percent in (1, 10, 50, 90, 99)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Size and seed of the dataset."""

    num_episodes: int = 120
    image_size: int = 96
    seed: int = 0
    shuffled: bool = False
    """Deal pictures and prompts out to other frames at random. What a model learns from such data it has not learned
    from its inputs: the control to a model trained on the same seed's data as it is."""


def write_dataset(root: pathlib.Path, config: SyntheticConfig | None = None) -> None:
    """Writes a dataset folder at `root`, complete or not at all: it is built beside `root` and renamed.

    Raises:
        UserError: `root` exists.
    """
    config = config or SyntheticConfig()
    if root.exists():
        raise UserError(f"{root} exists already. Use it as it is, or remove it to have it written anew: rm -r {root}")
    root.parent.mkdir(parents=True, exist_ok=True)
    aside = pathlib.Path(tempfile.mkdtemp(prefix=f".{root.name}.", dir=root.parent))
    try:
        _write_files(aside, config)
        aside.chmod(0o755)
        os.rename(aside, root)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_files(root: pathlib.Path, config: SyntheticConfig) -> None:
    episodes = [_episode(config, index) for index in range(config.num_episodes)]
    if config.shuffled:
        episodes = _shuffled(episodes, config.seed)
    episode_rows: list[dict[str, Any]] = []
    statistics: dict[str, list[dict[str, Any]]] = {}
    num_frames = 0
    for first in range(0, config.num_episodes, _EPISODES_PER_FILE):
        file_index = first // _EPISODES_PER_FILE
        path = root / _DATA_PATH.format(chunk_index=0, file_index=file_index)
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, _data_schema()) as writer:
            for index, episode in enumerate(episodes[first : first + _EPISODES_PER_FILE], first):
                columns = _columns(episode, index, num_frames)
                writer.write_table(_data_table(episode, columns))
                of_episode = {name: _statistics(values) for name, values in columns.items()}
                of_episode |= {name: _image_statistics(images) for name, images in _images(episode).items()}
                for name, values in of_episode.items():
                    statistics.setdefault(name, []).append(values)
                end = num_frames + len(episode.state)
                flat = {f"stats/{name}/{key}": value for name, of in of_episode.items() for key, value in of.items()}
                episode_rows.append(
                    {
                        "episode_index": index,
                        "tasks": [TASKS[task] for task in np.unique(episode.task_index)],
                        "length": len(episode.state),
                        "data/chunk_index": 0,
                        "data/file_index": file_index,
                        "dataset_from_index": num_frames,
                        "dataset_to_index": end,
                        **flat,
                        "meta/episodes/chunk_index": 0,
                        "meta/episodes/file_index": 0,
                    }
                )
                num_frames = end
    episodes_path = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    episodes_path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(episode_rows), episodes_path)
    pq.write_table(_tasks_table(), root / "meta" / "tasks.parquet")
    _write_json(root / "meta" / "stats.json", {name: _merged(values) for name, values in statistics.items()})
    _write_json(root / "meta" / "info.json", _info(config, num_frames))


def _episode(config: SyntheticConfig, index: int) -> Episode:
    """One generator per episode: a longer dataset starts with the same episodes as a shorter one."""
    rng = np.random.default_rng([config.seed, index])
    return make_episode(rng, task=index % len(TASKS), image_size=config.image_size)


def _shuffled(episodes: list[Episode], seed: int) -> list[Episode]:
    """Pictures and prompts of all frames dealt out anew; states and actions stay."""
    ends = np.cumsum([len(episode.state) for episode in episodes])[:-1]
    order = np.random.default_rng([seed, len(episodes)]).permutation(sum(len(episode.state) for episode in episodes))

    def dealt(name: str) -> list[np.ndarray]:
        return np.split(np.concatenate([getattr(episode, name) for episode in episodes])[order], ends)

    parts = zip(episodes, dealt("task_index"), dealt("base"), dealt("wrist"), strict=True)
    return [dataclasses.replace(e, task_index=task, base=base, wrist=wrist) for e, task, base, wrist in parts]


def _columns(episode: Episode, index: int, first_row: int) -> dict[str, np.ndarray]:
    """The columns of one episode that hold numbers, in the features' order."""
    frame = np.arange(len(episode.state))
    return {
        "observation.state": episode.state,
        "action": episode.action,
        "timestamp": (frame / FPS).astype(np.float32),
        "frame_index": frame,
        "episode_index": np.full_like(frame, index),
        "index": first_row + frame,
        "task_index": episode.task_index,
    }


def _images(episode: Episode) -> dict[str, np.ndarray]:
    return dict(zip(CAMERAS, (episode.base, episode.wrist), strict=True))


def _data_schema() -> pa.Schema:
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    return pa.schema(
        [
            *((name, image) for name in CAMERAS),
            ("observation.state", pa.list_(pa.float32(), len(STATE_NAMES))),
            ("action", pa.list_(pa.float32(), len(ACTION_NAMES))),
            ("timestamp", pa.float32()),
            *((name, pa.int64()) for name in _INTEGER_COLUMNS),
        ],
        # What the `datasets` library writes, so that it shows the cameras as pictures.
        metadata={"huggingface": json.dumps({"info": {"features": _hub_features()}})},
    )


def _hub_features() -> dict[str, Any]:
    def numbers(length: int) -> dict[str, Any]:
        return {"feature": {"dtype": "float32", "_type": "Value"}, "length": length, "_type": "List"}

    return {
        **{name: {"_type": "Image"} for name in CAMERAS},
        "observation.state": numbers(len(STATE_NAMES)),
        "action": numbers(len(ACTION_NAMES)),
        "timestamp": {"dtype": "float32", "_type": "Value"},
        **{name: {"dtype": "int64", "_type": "Value"} for name in _INTEGER_COLUMNS},
    }


def _data_table(episode: Episode, columns: dict[str, np.ndarray]) -> pa.Table:
    arrays: dict[str, Any] = {
        name: [{"bytes": _png(image), "path": f"frame-{i:06d}.png"} for i, image in enumerate(images)]
        for name, images in _images(episode).items()
    }
    arrays |= {name: values.tolist() for name, values in columns.items()}
    return pa.Table.from_pydict(arrays, schema=_data_schema())


def _png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", compress_level=4)
    return buffer.getvalue()


def _statistics(values: np.ndarray) -> dict[str, Any]:
    """LeRobot's statistics of one column, per dimension."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    return {**{name: of(flat).tolist() for name, of in _STATISTICS.items()}, "count": [len(values)]}


def _image_statistics(images: np.ndarray) -> dict[str, Any]:
    """As `_statistics`, per colour channel in [0, 1], shaped (3, 1, 1); from every fourth pixel."""
    pixels = images[:, ::4, ::4].reshape(-1, 3) / 255.0
    values = {name: of(pixels)[:, None, None].tolist() for name, of in _STATISTICS.items()}
    return {**values, "count": [len(images)]}


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of all episodes from those of each; quantiles are averaged, as LeRobot itself does."""
    count = np.array([part["count"][0] for part in parts], np.float64)
    weight = count / count.sum()

    def column(name: str) -> np.ndarray:
        return np.array([part[name] for part in parts])

    def mean(values: np.ndarray) -> np.ndarray:
        return np.tensordot(weight, values, axes=1)

    centre = mean(column("mean"))
    merged = {name: mean(column(name)) for name in _STATISTICS if name.startswith("q")}
    merged |= {"min": column("min").min(0), "max": column("max").max(0), "mean": centre}
    merged["std"] = np.sqrt(mean(column("std") ** 2 + (column("mean") - centre) ** 2))
    return {**{name: value.tolist() for name, value in merged.items()}, "count": [int(count.sum())]}


def _tasks_table() -> pa.Table:
    """Column `task` is the index, as pandas marks it: LeRobot reads this file with pandas."""
    text = {"pandas_type": "unicode", "numpy_type": "object"}
    columns = [
        {
            "name": "task_index",
            "field_name": "task_index",
            "pandas_type": "int64",
            "numpy_type": "int64",
            "metadata": None,
        },
        {"name": "task", "field_name": "task", **text, "metadata": None},
    ]
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [{"name": None, "field_name": None, **text, "metadata": {"encoding": "UTF-8"}}],
        "columns": columns,
        "pandas_version": "2.3.3",
    }
    table = pa.table({"task_index": pa.array(range(len(TASKS)), pa.int64()), "task": list(TASKS)})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def _info(config: SyntheticConfig, num_frames: int) -> dict[str, Any]:
    image_shape = [config.image_size, config.image_size, 3]
    features: dict[str, Any] = {
        name: {"dtype": "image", "shape": image_shape, "names": ["height", "width", "channel"]} for name in CAMERAS
    }
    features["observation.state"] = {"dtype": "float32", "shape": [len(STATE_NAMES)], "names": list(STATE_NAMES)}
    features["action"] = {"dtype": "float32", "shape": [len(ACTION_NAMES)], "names": list(ACTION_NAMES)}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    features |= {name: {"dtype": "int64", "shape": [1], "names": None} for name in _INTEGER_COLUMNS}
    return {
        "codebase_version": "v3.0",
        "robot_type": "drawn_gripper",
        "total_episodes": config.num_episodes,
        "total_frames": num_frames,
        "total_tasks": len(TASKS),
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": FPS,
        "splits": {"train": f"0:{config.num_episodes}"},
        "data_path": _DATA_PATH,
        "video_path": None,
        "features": features,
    }


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=4) + "\n")
