"""Encoded images in parquet files, read by row."""

import collections
import contextlib
import os
import pathlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from openpi_accel.data.lerobot.pages import PageTable, PageValues, Unsupported, read_page, read_page_table, read_ranges
from openpi_accel.data.lerobot.parquet import explained, open_parquet
from openpi_accel.data.lerobot.segments import Ranges, Scattered
from openpi_accel.errors import UserError

_OBJECT_BYTES = 600  # of an entry beside its arrays' content


class Cache:
    """Values by name, the latest used up to `max_size` in all; a single larger one is kept alone. For threads."""

    def __init__(self, max_size: int) -> None:
        self.max_size, self.size = max_size, 0
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[Any, tuple[Any, int]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get[T](self, name: Any, make: Callable[[], T], size_of: Callable[[T], int] = lambda value: 1) -> T:
        """The kept value, or a new one. Two threads may make the same one; one of them is kept."""
        with self._lock:
            if name in self._entries:
                self._entries.move_to_end(name)
                return self._entries[name][0]
        value = make()
        size = size_of(value)
        with self._lock:
            if name not in self._entries:
                self._entries[name] = value, size
                self.size += size
            while self.size > self.max_size and len(self._entries) > 1:
                _, (_, old) = self._entries.popitem(last=False)
                self.size -= old
        return value

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._entries.clear()
            self.size = 0


class ImageColumns:
    """The bytes of images in parquet files, without holding a whole dataset in memory.

    A row costs its own bytes, once its page's layout is known, which reads the page (about 1 MB) the first time. Where
    a page is compressed so that no image is left whole in it, a row costs the page; where a file's layout is unusual,
    one column chunk. The latest used pages and chunks are kept, up to `max_bytes` for all threads together, layouts up
    to `max_layout_bytes` (LIBERO's take about 50 MB); footers and page tables up to `max_tables` each.
    """

    def __init__(
        self,
        root: pathlib.Path,
        max_bytes: int = 256 << 20,
        max_layout_bytes: int = 128 << 20,
        max_tables: int = 8192,
        max_files: int = 256,
    ) -> None:
        self._root = root
        self._footers, self._tables, self._data = Cache(max_tables), Cache(max_tables), Cache(max_bytes)
        self._ranges, self._files = Cache(max_layout_bytes), Cache(max_files)

    def read(self, path: pathlib.Path, key: str, rows: Sequence[int] | np.ndarray) -> list[bytes]:
        """The encoded images of column `key` in these rows of one file.

        Raises:
            UserError: missing file, column, row or image; damaged file.
        """
        footer, starts = self._footers.get(path, lambda: _read_footer(path))
        leaf: int = self._tables.get((path, key), lambda: _leaf(path, footer, key))
        images = []
        for row in map(int, rows):
            if not 0 <= row < starts[-1]:
                raise UserError(f"{path} has {starts[-1]} rows; row {row} is not there. Fetch the dataset again.")
            group = int(np.searchsorted(starts, row, side="right")) - 1
            image = self._by_page(path, footer, leaf, group, row - int(starts[group]))
            images.append(image or self._by_chunk(path, footer, key, group, row, row - int(starts[group])))
        return images

    def clear(self) -> None:
        """Forgets what is kept."""
        for cache in (self._footers, self._tables, self._data, self._ranges, self._files):
            cache.clear()

    def _by_page(self, path: pathlib.Path, footer: pq.FileMetaData, leaf: int, group: int, at: int) -> bytes | None:
        """The image in row `at` of a row group; None if it is null there or the layout is unusual."""
        name = (path, leaf, group)
        try:
            with explained(path):
                table: PageTable = self._tables.get(name, lambda: read_page_table(path, footer, group, leaf))
                page = int(np.searchsorted(table.starts, at, side="right")) - 1
                at -= int(table.starts[page])
                found: Ranges | None = self._ranges.get((*name, page), lambda: _ranges(path, table, page), _ranges_size)
                if found is not None:
                    file: _OpenFile = self._files.get(path, lambda: _OpenFile(path))
                    return found.value(at, file.read)
                values: PageValues = self._data.get(
                    (*name, page), lambda: read_page(path, table, page), lambda values: values.nbytes
                )
                return values.value(at)
        except Unsupported:
            return None
        except (ValueError, IndexError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path} is damaged ({error}). Fetch it again.") from error

    def _by_chunk(self, path: pathlib.Path, footer: pq.FileMetaData, key: str, group: int, row: int, at: int) -> bytes:
        chunk = self._data.get((path, key, group), lambda: _read_chunk(path, footer, key, group), lambda c: c.nbytes)
        value: bytes | dict | None = chunk[at].as_py()
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


class _OpenFile:
    """A file that is closed when nobody reads from it any more."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the file.

        Raises:
            ValueError: it is shorter.
        """
        data = os.pread(self._file, size, offset)
        if len(data) != size:
            raise ValueError("the file ends within a value")
        return data


def _ranges(path: pathlib.Path, table: PageTable, page: int) -> Ranges | None:
    try:
        return read_ranges(path, table, page)
    except Scattered:
        return None


def _ranges_size(ranges: Ranges | None) -> int:
    return _OBJECT_BYTES + (ranges.nbytes if ranges is not None else 0)


def _read_footer(path: pathlib.Path) -> tuple[pq.FileMetaData, np.ndarray]:
    """The footer, and the first row of every row group, then the number of rows."""
    with contextlib.closing(open_parquet(path)) as file:
        footer = file.metadata
    sizes = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
    return footer, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _leaf(path: pathlib.Path, footer: pq.FileMetaData, key: str) -> int:
    """Number of the leaf column that holds the bytes: the column itself, or the field `bytes` of a struct."""
    names = [footer.schema.column(i).path for i in range(footer.num_columns)]
    for name in (f"{key}.bytes", key):
        if name in names:
            return names.index(name)
    columns = ", ".join(dict.fromkeys(name.removesuffix(".bytes").removesuffix(".path") for name in names))
    raise UserError(f"{path} has no column {key!r} with images. Its columns are {columns}.")


def _read_chunk(path: pathlib.Path, footer: pq.FileMetaData, key: str, group: int) -> pa.Array:
    with contextlib.closing(open_parquet(path, footer)) as file, explained(path):
        column = file.read_row_group(group, columns=[key], use_threads=False).column(key)
    return pa.concat_arrays(column.chunks)
