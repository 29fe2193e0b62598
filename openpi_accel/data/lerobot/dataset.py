"""A LeRobot dataset of any version as arrays: numeric columns, action chunks, task texts and camera frames.

Letters: N frames of the dataset, B rows asked for, A action horizon, D values per frame, H W image height and width.
Rows are numbered 0..N-1 through the data files, which is lerobot's own numbering.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import threading
from collections.abc import Callable

import numpy as np

from openpi_accel.config.schema import VideoDecoderName
from openpi_accel.data.images import image_format
from openpi_accel.data.lerobot import v2, v3
from openpi_accel.data.lerobot.features import Camera, Feature, read_info
from openpi_accel.data.lerobot.frames import FrameError, FrameReader
from openpi_accel.data.lerobot.index import Index, Track, untracked
from openpi_accel.data.lerobot.mapped import Damaged, Mapped, read_mapped
from openpi_accel.data.lerobot.parquet import read_column
from openpi_accel.data.video_torchcodec import choose_reader
from openpi_accel.errors import UserError
from openpi_accel.sizes import format_bytes

# Columns of every LeRobot dataset; one number per frame, declared with shape (1,).
BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_READERS = {version: reader for reader in (v2, v3) for version in reader.VERSIONS}
# Declared dtypes whose columns must hold plain numbers.
_NUMERIC = ("float", "int", "uint", "bool")


def open_dataset(
    root: pathlib.Path,
    video_decoder: VideoDecoderName = "auto",
    *,
    mapped: Mapped | None = None,
    track: Track = untracked,
) -> "LeRobotDataset":
    """Opens a dataset folder of format v2.0, v2.1 or v3.0. Reads the index; no images and no videos.

    Args:
        root: the folder.
        video_decoder: `choose_reader`.
        mapped: the index and some columns of this state of the dataset, which are then not read again.
        track: told of the files that are read.

    Raises:
        UserError: the folder is no dataset, of an unknown version, incomplete or damaged; names the file. Or the
            decoder is not there.
    """
    root = pathlib.Path(root)
    info = read_info(root)
    reader = _READERS.get(info.version)
    if reader is None:
        raise UserError(
            f"{info.path} says codebase_version {info.version}; this version reads {', '.join(_READERS)}. Convert the "
            "dataset with lerobot's own converter, or update this program if the format is newer."
        )
    index = reader.read_index(root, info, track) if mapped is None else mapped.index
    return LeRobotDataset(root, index, video_decoder, mapped)


def _reopen(root: pathlib.Path, video_decoder: VideoDecoderName, mapped_path: pathlib.Path | None) -> "LeRobotDataset":
    """In another process: by the file that the sender has mapped, which it has checked, if it is still there."""
    mapped = None
    if mapped_path is not None:
        with contextlib.suppress(Damaged):
            mapped = read_mapped(mapped_path, root, read_info(root), check=False)
    return open_dataset(root, video_decoder, mapped=mapped)


class LeRobotDataset:
    """The reader. Safe to use from several threads.

    Attributes:
        root: the folder.
        version: v2.0, v2.1 or v3.0.
        fps: frames per second.
        features: column or camera -> what is declared.
        cameras: camera -> how it is stored.
        tasks: task_index -> text.
        num_frames, num_episodes: N, and how many episodes they are in.
        episode_ids: (num_episodes,) the dataset's own episode numbers, in the order of the rows.
        episode_starts: (num_episodes + 1,) first row of each episode, then N.
        index: all of the index.
    """

    def __init__(
        self,
        root: pathlib.Path,
        index: Index,
        video_decoder: VideoDecoderName = "auto",
        mapped: Mapped | None = None,
    ) -> None:
        self.root = root
        self.version = index.info.version
        self.fps = index.info.fps
        self.features: dict[str, Feature] = index.info.features
        self.cameras: dict[str, Camera] = index.info.cameras
        self.tasks = index.tasks
        self.episode_ids = index.episode_ids
        self.episode_starts = index.episode_starts
        self.num_episodes = len(index.episode_ids)
        self.num_frames = int(index.episode_starts[-1])
        self.index = index
        self._frames, self._video_decoder = FrameReader(root, index, choose_reader(video_decoder)), video_decoder
        self._lock = threading.Lock()
        self._mapped = mapped
        self._columns: dict[str, np.ndarray] = {} if mapped is None else dict(mapped.columns)

    def __reduce__(self) -> tuple[Callable[..., "LeRobotDataset"], tuple[object, ...]]:
        path = None if self._mapped is None else self._mapped.path
        return _reopen, (self.root, self._video_decoder, path)  # another process opens its own files

    @property
    def memory(self) -> str:
        """How the columns read so far lie in memory, for people."""
        size = format_bytes(sum(values.nbytes for values in self._columns.values()))
        if self._mapped is None:
            return f"numbers: {size} in each process"
        return f"numbers: {size}, one copy for all processes of this machine, {self._mapped.path}"

    def close(self) -> None:
        """Closes open files and forgets what is cached; the dataset stays usable."""
        self._frames.close()

    def column(self, key: str, track: Track = untracked) -> np.ndarray:
        """A numeric or text column: (N,) or (N, D…), in its own dtype, read-only. Read once, then kept.

        Reads only this column of the parquet files: images and videos need not be there. `track` is told of them.

        Raises:
            UserError: no such column, a camera, or a damaged file.
        """
        if key in self.cameras:
            raise UserError(f"{key!r} is a camera of {self.root}; its pixels come from frames(), not column().")
        with self._lock:
            if key not in self._columns:
                lengths = np.diff(self.index.data_starts).tolist()
                parts = [
                    self._shaped(key, read_column(path, key, length))
                    for path, length in track(list(zip(self.index.data_files, lengths, strict=True)), f"column {key}")
                ]
                if len({part.shape[1:] for part in parts}) > 1:
                    odd = next(i for i, part in enumerate(parts) if part.shape[1:] != parts[0].shape[1:])
                    raise UserError(
                        f"{self.index.data_files[odd]}: column {key!r} has values of shape {parts[odd].shape[1:]}, "
                        f"but {self.index.data_files[0]} has {parts[0].shape[1:]}. Every frame needs the same."
                    )
                values = np.concatenate(parts)
                values.setflags(write=False)
                self._columns[key] = values
            return self._columns[key]

    def _shaped(self, key: str, values: np.ndarray) -> np.ndarray:
        """The declared shape: LeRobot stores shape (1,) as plain numbers, and a converter may store it as lists."""
        if key in BOOKKEEPING:
            return values.reshape(len(values))
        feature = self.features.get(key)
        if feature is not None and feature.dtype.startswith(_NUMERIC) and values.dtype.kind in "OUS":
            raise UserError(
                f"{self.root}: column {key!r} holds text or mixed values, but meta/info.json declares {feature.dtype}. "
                "Correct the file or info.json."
            )
        if feature is None or values.dtype == object:
            return values
        if math.prod(values.shape[1:]) != math.prod(feature.shape):
            raise UserError(
                f"{self.root}: column {key!r} has values of shape {values.shape[1:]}, but meta/info.json declares "
                f"{feature.shape}. Correct info.json, or fetch the dataset again."
            )
        return values.reshape(len(values), *feature.shape)

    def episode_of(self, rows: np.ndarray) -> np.ndarray:
        """Position of each row's episode in `episode_ids`: (B,).

        Raises:
            UserError: a row is not in the dataset.
        """
        rows = np.asarray(rows, np.int64).reshape(-1)
        if len(rows) and (rows.min() < 0 or rows.max() >= self.num_frames):
            bad = rows[(rows < 0) | (rows >= self.num_frames)][0]
            raise UserError(f"{self.root} has the rows 0 to {self.num_frames - 1}; row {bad} is not there.")
        return np.searchsorted(self.episode_starts, rows, side="right") - 1

    def task_of(self, rows: np.ndarray) -> list[str]:
        """The task text of each row.

        Raises:
            UserError: a row's task_index is not in the task table.
        """
        rows = np.asarray(rows, np.int64).reshape(-1)
        self.episode_of(rows)
        numbers = self.column("task_index")[rows].tolist()
        for row, number in zip(rows.tolist(), numbers, strict=True):
            if number not in self.tasks:
                raise UserError(
                    f"{self.root}: row {row} has task_index {number}, which the task table in {self.root / 'meta'} "
                    f"does not list (it has {len(self.tasks)} tasks). Fetch the dataset again, or add the task."
                )
        return [self.tasks[number] for number in numbers]

    def chunk(self, key: str, rows: np.ndarray, horizon: int) -> tuple[np.ndarray, np.ndarray]:
        """The values of this and the next frames: (B, A, D), and (B, A) True where the episode has already ended.

        Past the end the episode's last value repeats.

        Raises:
            UserError: as `column`; a row is not in the dataset.
        """
        rows = np.asarray(rows, np.int64).reshape(-1)
        last = self.episode_starts[self.episode_of(rows) + 1] - 1
        wanted = rows[:, None] + np.arange(horizon)
        values = self.column(key)
        values = values.reshape(self.num_frames, -1)
        return values[np.minimum(wanted, last[:, None])], wanted > last[:, None]

    def frames(self, camera: str, rows: np.ndarray) -> list[np.ndarray]:
        """Camera frames, uint8 H W 3, in the order of `rows`; read sorted by file and frame, repeated rows once.

        Raises:
            UserError: no such camera; a row is not in the dataset.
            FrameError: a frame is missing or damaged.
        """
        if camera not in self.cameras:
            known = ", ".join(self.cameras) or "none"
            raise UserError(f"{self.root} has no camera {camera!r}. Its cameras are: {known}.")
        rows = np.asarray(rows, np.int64).reshape(-1)
        wanted, back = np.unique(rows, return_inverse=True)
        self.episode_of(wanted)
        frames = self._frames.read(camera, wanted)
        return [frames[position] for position in back.reshape(-1)]

    def image_bytes(self, camera: str, row: int) -> bytes:
        """One row's image as it is stored, of a camera kept in parquet. Raises as `frames`."""
        return self._frames.image_bytes(camera, row)

    def codec_of(self, camera: str, row: int = 0) -> str:
        """How one row's frame is encoded, as its bytes say: png, jpeg, av1, h264, …

        Raises:
            FrameError: the image or video file is missing or damaged.
        """
        if self.cameras[camera].kind == "video":
            return self._frames.video_table(camera, row).codec
        return image_format(self._frames.image_bytes(camera, row))

    def files(self) -> list[pathlib.Path]:
        """Every file that rows or frames come from, sorted, each once; one may be missing."""
        clips = (file for clips in self.index.clips.values() for file in clips.files)
        loose = (path for path in (self.root / "images").rglob("*") if path.is_file())
        return sorted({*self.index.data_files, *clips, *loose})

    def frame_error(self, camera: str, row: int, why: str) -> FrameError:
        """The error that names this frame."""
        return self._frames.error(camera, row, why)

    def fingerprint(self) -> str:
        """A hash of version, features, tasks, episodes, and the sizes of all files: changes when the dataset does."""
        sizes = [
            (file.relative_to(self.root).as_posix(), file.stat().st_size if file.is_file() else None)
            for file in self.files()
        ]
        content = {
            "version": self.version,
            "fps": self.fps,
            "features": {key: dataclasses.asdict(feature) for key, feature in self.features.items()},
            "tasks": sorted(self.tasks.items()),
            "episodes": self.episode_ids.tolist(),
            "starts": self.episode_starts.tolist(),
            "files": sizes,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
