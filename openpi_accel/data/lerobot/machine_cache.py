"""A dataset's index and its numeric columns, read once and then shared by all processes of a machine.

<folder>/<dataset's name>-<hash of its path>/<hash of its meta files' states>.arrow      (`mapped`)

A file is used only while the size and time of every meta and parquet file are those of when it was made, so a dataset
that has changed is read again. The dataset's fingerprint will not do for that: it needs the index, which is what takes
the time, and it does not see a file that was changed in place.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterable

from openpi_accel.config.schema import VideoDecoderName
from openpi_accel.data.lerobot.dataset import LeRobotDataset, open_dataset
from openpi_accel.data.lerobot.features import read_info
from openpi_accel.data.lerobot.index import Track, untracked
from openpi_accel.data.lerobot.mapped import (
    FORMAT,
    SUFFIX,
    Damaged,
    Mapped,
    can_hold,
    file_states,
    read_mapped,
    write_mapped,
)
from openpi_accel.sizes import format_bytes

_KEPT = 8  # files of one dataset: as many states of it, or machines that share the folder but not the dataset
_ABANDONED_S = 24 * 3600.0  # after which a file that is still being written has lost its writer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineCache:
    """Where the files are, and for which datasets there are some.

    Attributes:
        folder: of all datasets.
        min_files, min_bytes: a dataset with fewer parquet files and fewer bytes of columns is read by each process:
            that takes about a tenth of a second, and a few per cent of a worker's memory.
    """

    folder: pathlib.Path
    min_files: int = 64
    min_bytes: int = 4 << 20


def open_shared(
    root: pathlib.Path,
    columns_of: Callable[[LeRobotDataset], Iterable[str]],
    cache: MachineCache,
    video_decoder: VideoDecoderName = "auto",
    track: Track = untracked,
    say: Callable[[str], None] = lambda text: None,
) -> LeRobotDataset:
    """Opens a dataset so that these columns are one copy for all processes of the machine (`LeRobotDataset.memory`).

    What is in the cache is compared with its checksum here. A process that the dataset is sent to maps the same file
    without reading it.

    Args:
        root: the dataset's folder.
        columns_of: names the numeric columns that will be used.
        cache: where files are kept. One that is damaged is made anew; where none can be written, the columns stay in
            this process's memory.
        video_decoder: as for `open_dataset`.
        track: told of the files that are read.
        say: told, in a sentence, of a file that was damaged or could not be written.

    Raises:
        UserError: as `open_dataset` and `LeRobotDataset.column`.
    """
    root = pathlib.Path(root)
    # States are taken before the files are read: a change in between must not go unseen.
    path = _path(cache.folder, root)
    mapped = _find(path, root, say)
    dataset = open_dataset(root, video_decoder, mapped=mapped, track=track)
    wanted = list(columns_of(dataset))
    if mapped is not None and set(wanted) <= mapped.columns.keys():
        with contextlib.suppress(OSError):
            os.utime(path)  # the files used last are kept
        return dataset
    states = file_states(root, dataset.index.data_files)
    columns = {} if mapped is None else dict(mapped.columns)
    columns |= {key: dataset.column(key, track) for key in wanted if key not in columns}
    num_bytes = sum(values.nbytes for values in columns.values())
    small = len(states) < cache.min_files and num_bytes < cache.min_bytes
    if small or not all(can_hold(values) for values in columns.values()):
        return dataset
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_mapped(path, root, dataset.index, columns, states)
        mapped = read_mapped(path, root, dataset.index.info, check=True)
    except (OSError, Damaged) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        say(
            f"The dataset's numbers ({format_bytes(num_bytes)}) cannot be kept in {path.parent} ({why}), so every "
            "process reads its own: OPENPI_CACHE_HOME names another folder."
        )
        return dataset
    if mapped is None:  # somebody has emptied the folder in this moment
        return dataset
    _remove_old(path.parent, keep=path)
    return open_dataset(root, video_decoder, mapped=mapped)


def _path(folder: pathlib.Path, root: pathlib.Path) -> pathlib.Path:
    meta = file_states(root, sorted(path for path in (root / "meta").rglob("*") if path.is_file()))
    whole = root.resolve()
    return folder / f"{whole.name}-{_hash(os.fspath(whole))}" / f"{_hash(json.dumps([FORMAT, meta]))}{SUFFIX}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _find(path: pathlib.Path, root: pathlib.Path, say: Callable[[str], None]) -> Mapped | None:
    """The file, whole and of this state of the dataset."""
    try:
        mapped = read_mapped(path, root, read_info(root), check=True)
    except Damaged as error:
        say(f"{path} cannot be used ({error}): the dataset is read again.")
        return None
    if mapped is None or mapped.data_files != file_states(root, mapped.index.data_files):
        return None
    return mapped


def _remove_old(folder: pathlib.Path, keep: pathlib.Path) -> None:
    """But for the files used last. Also what a killed process has left. Who has a file mapped keeps what is in it."""

    def age_s(file: pathlib.Path) -> float:
        try:
            return time.time() - file.stat().st_mtime
        except OSError:  # another process was faster
            return 0.0

    old = sorted((f for f in folder.glob(f"*{SUFFIX}") if f != keep), key=age_s)[_KEPT - 1 :]
    for file in (*old, *(f for f in folder.glob(".*.tmp") if age_s(f) > _ABANDONED_S)):
        with contextlib.suppress(OSError):
            file.unlink()
