"""Encoded images in parquet files, read by row."""

import collections
import contextlib
import pathlib
import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from openpi_accel.data.lerobot.parquet import explained, open_parquet
from openpi_accel.errors import UserError


class ImageColumns:
    """The bytes of images in parquet files, without holding a whole dataset in memory.

    A parquet file can only be read by whole column chunks (one column of one row group), so that is the unit that is
    kept: the latest used, up to `max_bytes` for all threads together. A row group larger than that is kept alone. Reads
    in file order touch each chunk once; far random reads cost one chunk each.
    """

    def __init__(self, root: pathlib.Path, max_bytes: int = 512 << 20, max_footers: int = 4096) -> None:
        self._root, self._max_bytes, self._max_footers = root, max_bytes, max_footers
        self._lock = threading.Lock()
        self._chunks: collections.OrderedDict[tuple[pathlib.Path, str, int], pa.Array] = collections.OrderedDict()
        self._bytes = 0
        self._footers: collections.OrderedDict[pathlib.Path, tuple[pq.FileMetaData, np.ndarray]] = (
            collections.OrderedDict()
        )

    def read(self, path: pathlib.Path, key: str, rows: Sequence[int] | np.ndarray) -> list[bytes]:
        """The encoded images of column `key` in these rows of one file.

        Raises:
            UserError: missing file, column, row or image; damaged file.
        """
        footer, starts = self._footer(path)
        images = []
        for row in rows:
            if not 0 <= row < starts[-1]:
                raise UserError(f"{path} has {starts[-1]} rows; row {row} is not there. Fetch the dataset again.")
            group = int(np.searchsorted(starts, row, side="right")) - 1
            value = self._chunk(path, key, group, footer)[int(row - starts[group])].as_py()
            images.append(self._bytes_of(path, key, int(row), value))
        return images

    def clear(self) -> None:
        """Forgets what is kept."""
        with self._lock:
            self._chunks.clear()
            self._footers.clear()
            self._bytes = 0

    def _bytes_of(self, path: pathlib.Path, key: str, row: int, value: bytes | dict | None) -> bytes:
        if isinstance(value, dict):
            if value.get("bytes") is None and value.get("path"):  # the image is a file of its own
                image = self._root / value["path"]
                try:
                    return image.read_bytes()
                except OSError as error:
                    raise UserError(
                        f"{image} is missing or unreadable ({error}); {path}, row {row} names it."
                    ) from error
            value = value.get("bytes")
        if value is None:
            raise UserError(f"{path}: column {key!r} has no image in row {row}. Fetch the dataset again.")
        return value

    def _footer(self, path: pathlib.Path) -> tuple[pq.FileMetaData, np.ndarray]:
        """The footer, and the first row of every row group, then the number of rows."""
        with self._lock:
            if path in self._footers:
                self._footers.move_to_end(path)
                return self._footers[path]
        with contextlib.closing(open_parquet(path)) as file:
            footer = file.metadata
        sizes = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        entry = footer, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        with self._lock:
            self._footers[path] = entry
            if len(self._footers) > self._max_footers:
                self._footers.popitem(last=False)
        return entry

    def _chunk(self, path: pathlib.Path, key: str, group: int, footer: pq.FileMetaData) -> pa.Array:
        name = (path, key, group)
        with self._lock:
            if name in self._chunks:
                self._chunks.move_to_end(name)
                return self._chunks[name]
        chunk = self._load(path, key, group, footer)
        with self._lock:
            if name not in self._chunks:
                self._chunks[name] = chunk
                self._bytes += chunk.nbytes
            while self._bytes > self._max_bytes and len(self._chunks) > 1:
                _, old = self._chunks.popitem(last=False)
                self._bytes -= old.nbytes
        return chunk

    def _load(self, path: pathlib.Path, key: str, group: int, footer: pq.FileMetaData) -> pa.Array:
        with contextlib.closing(open_parquet(path, footer)) as file, explained(path):
            if key not in file.schema_arrow.names:
                raise UserError(f"{path} has no column {key!r}. Its columns are {', '.join(file.schema_arrow.names)}.")
            column = file.read_row_group(group, columns=[key], use_threads=False).column(key)
        return pa.concat_arrays(column.chunks)
