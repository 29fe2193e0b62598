"""One file with a dataset's index and some numeric columns, mapped into memory by every process that opens it.

An Arrow IPC file: the columns are a record batch of one row per frame, whose bytes the processes of a machine share in
the page cache; the index, the state of the files it was read from and a checksum are JSON in the schema's metadata.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from openpi_accel.data.lerobot.features import Info
from openpi_accel.data.lerobot.index import Clips, Index

SUFFIX = ".arrow"
FORMAT = 1  # part of the files' names: another version of this module looks for others
_KEY = b"openpi_accel"

# Name below the dataset's folder, size, time of the last change in ns; -1, -1 where there is no such file.
type FileStates = list[list[str | int]]


class Damaged(Exception):
    """The file cannot be read, or is not what was written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mapped:
    """What a file holds.

    Attributes:
        path: the file.
        index: of the dataset.
        columns: (N,) or (N, D…) each, read-only, lying in the mapped file.
        data_files: the states of the parquet files when they were read.
    """

    path: pathlib.Path
    index: Index
    columns: Mapping[str, np.ndarray]
    data_files: FileStates


def file_states(root: pathlib.Path, files: Iterable[pathlib.Path]) -> FileStates:
    """Of each file, in their order."""
    states: FileStates = []
    for file in files:
        try:
            stat = file.stat()
            states.append([_name(root, file), stat.st_size, stat.st_mtime_ns])
        except OSError:
            states.append([_name(root, file), -1, -1])
    return states


def can_hold(values: np.ndarray) -> bool:
    """Whether a column can lie in such a file as it is: numbers of whole bytes, and some."""
    return values.dtype.kind in "iuf" and values.dtype.isnative and values.size > 0


def write_mapped(
    path: pathlib.Path,
    root: pathlib.Path,
    index: Index,
    columns: Mapping[str, np.ndarray],
    data_files: FileStates,
) -> None:
    """Puts the file in place as a whole: another process finds the old one, the new one or none.

    Args:
        path: where to; its folder must be there.
        root: the dataset's folder.
        index: of the dataset.
        columns: (N,) or (N, D…) each, such that `can_hold`.
        data_files: states of the parquet files, taken before they were read.

    Raises:
        OSError: it cannot be written.
    """
    content = json.dumps(
        {
            "index": _index_to_json(root, index),
            "data_files": data_files,
            "shapes": {key: values.shape for key, values in columns.items()},
        }
    )
    head = json.dumps({"crc32": _checksum(content, columns), "content": content})
    arrays = [_to_arrow(values) for values in columns.values()]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(columns), metadata={_KEY: head})
    number, aside = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with open(number, "wb") as file:
            with pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def read_mapped(path: pathlib.Path, root: pathlib.Path, info: Info, *, check: bool) -> Mapped | None:
    """Maps the file; None where there is none.

    Args:
        path: of the file.
        root: the dataset's folder.
        info: what the dataset's info.json says.
        check: read all of it and compare with its checksum. One process does; those that it starts need not again.

    Raises:
        Damaged: it cannot be used.
    """
    try:
        with pa.memory_map(os.fspath(path)) as source:
            reader = pa.ipc.open_file(source)
            head = json.loads(reader.schema.metadata[_KEY])
            content = json.loads(head["content"])
            batch = reader.get_batch(0)
            columns = {key: _to_numpy(batch.column(key), shape) for key, shape in content["shapes"].items()}
            if check and _checksum(head["content"], columns) != head["crc32"]:
                raise Damaged("its checksum is another")
            index = _index_from_json(root, info, content["index"])
            return Mapped(path=path, index=index, columns=columns, data_files=content["data_files"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Damaged(str(error) or type(error).__name__) from error


def _checksum(content: str, columns: Mapping[str, np.ndarray]) -> int:
    """crc32 of everything that is read from the file."""
    crc = zlib.crc32(content.encode())
    for key, values in columns.items():
        crc = zlib.crc32(f"{key} {values.dtype.str} {values.shape}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(values).data.cast("B"), crc)
    return crc


def _to_arrow(values: np.ndarray) -> pa.Array:
    flat = pa.array(values.reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, math.prod(values.shape[1:]))


def _to_numpy(array: pa.Array, shape: list[int]) -> np.ndarray:
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    return flat.to_numpy(zero_copy_only=True).reshape(shape)


def _name(root: pathlib.Path, file: pathlib.Path) -> str:
    """Such that root / name is the file."""
    return str(file.relative_to(root)) if file.is_relative_to(root) else str(file)


def _index_to_json(root: pathlib.Path, index: Index) -> dict[str, Any]:
    return {
        "tasks": list(index.tasks.items()),
        "episode_ids": index.episode_ids.tolist(),
        "episode_starts": index.episode_starts.tolist(),
        "data_files": [_name(root, file) for file in index.data_files],
        "data_starts": index.data_starts.tolist(),
        "clips": {
            key: {
                "files": [_name(root, file) for file in clips.files],
                "file_of": clips.file_of.tolist(),
                "from_s": clips.from_s.tolist(),
            }
            for key, clips in index.clips.items()
        },
    }


def _index_from_json(root: pathlib.Path, info: Info, content: Mapping[str, Any]) -> Index:
    return Index(
        info=info,
        tasks=dict(content["tasks"]),
        episode_ids=np.array(content["episode_ids"], np.int64),
        episode_starts=np.array(content["episode_starts"], np.int64),
        data_files=[root / name for name in content["data_files"]],
        data_starts=np.array(content["data_starts"], np.int64),
        clips={
            key: Clips(
                files=[root / name for name in clips["files"]],
                file_of=np.array(clips["file_of"], np.int64),
                from_s=np.array(clips["from_s"], np.float64),
            )
            for key, clips in content["clips"].items()
        },
    )
