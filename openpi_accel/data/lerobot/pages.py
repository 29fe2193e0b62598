"""Single values of a binary parquet column, by reading one page instead of the whole column chunk.

Arrow reads column chunks as a whole (for LIBERO 10 MB for one image of 60 kB); a page holds about 1 MB. The layout is
that of the Parquet format specification: pages follow each other in a chunk, each behind a header in Thrift's compact
protocol. Only what image columns use is read here; for anything else `Unsupported` is raised, and the caller reads the
chunk through Arrow.
"""

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from openpi_accel.data.lerobot.segments import Ranges, Scattered, collect, plain_layout, read_varint, snappy_layout

# Numbers of the format specification (parquet.thrift).
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_PLAIN, _PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 0, 2, 3, 8
_CODECS = {"SNAPPY": "snappy", "ZSTD": "zstd", "GZIP": "gzip", "BROTLI": "brotli"}
_HEADER_BYTES = 1 << 14  # headers hold statistics, which writers cut at 4 KiB


class Unsupported(Exception):
    """The column is laid out in a way that this module does not read."""


@dataclasses.dataclass(frozen=True)
class Page:
    """One page of a chunk, after its header.

    Attributes:
        kind, encoding: numbers of the specification.
        offset, num_bytes: of the page's content in the file.
        num_raw_bytes: of the content once decompressed.
        num_values: including nulls.
        levels_bytes: length of the uncompressed levels in front (version 2 pages), else None.
        compressed: whether the values are.
    """

    kind: int
    encoding: int
    offset: int
    num_bytes: int
    num_raw_bytes: int
    num_values: int
    levels_bytes: int | None
    compressed: bool


@dataclasses.dataclass(frozen=True)
class PageTable:
    """The pages of one column chunk.

    Attributes:
        dictionary: its dictionary page, if it has one.
        pages: its data pages.
        starts: (num_pages + 1,) first row of each data page within the row group, then the number of rows.
        codec: Arrow's name of the compression, or None.
        max_level: definition level of a value that is there.
    """

    dictionary: Page | None
    pages: list[Page]
    starts: np.ndarray
    codec: str | None
    max_level: int


@dataclasses.dataclass(frozen=True)
class PageValues:
    """A decompressed page, ready for single values.

    Attributes:
        data: holds the values, each behind its length (4 bytes, little endian).
        places: (num_values,) offset of each value's length in `data`; -1 for a null.
        page: the page whose content `data` is the end of (the dictionary's, where the page refers to it).
        start: where in that content `data` begins.
    """

    data: memoryview
    places: np.ndarray
    page: Page
    start: int

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.data.nbytes + self.places.nbytes

    def value(self, at: int) -> bytes | None:
        """One value; None for a null."""
        place = int(self.places[at])
        if place < 0:
            return None
        end = place + 4 + int.from_bytes(self.data[place : place + 4], "little")
        if end > self.data.nbytes:
            raise ValueError("a value reaches past the end of its page")
        return bytes(self.data[place + 4 : end])


def read_page_table(path: pathlib.Path, footer: pq.FileMetaData, group: int, column: int) -> PageTable:
    """Reads the page headers of one column chunk.

    Raises:
        Unsupported: not a flat binary column, or an unusual layout.
        OSError: the file cannot be read.
    """
    schema, chunk = footer.schema.column(column), footer.row_group(group).column(column)
    if schema.physical_type != "BYTE_ARRAY" or schema.max_repetition_level:
        raise Unsupported("not a flat binary column")
    if chunk.compression != "UNCOMPRESSED" and chunk.compression not in _CODECS:
        raise Unsupported(f"compression {chunk.compression}")
    at = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        at = min(at, chunk.dictionary_page_offset)
    end = at + chunk.total_compressed_size
    dictionary, pages = None, []
    with path.open("rb", buffering=0) as file:
        while at < end:
            file.seek(at)
            page = _parse_header(file.read(min(_HEADER_BYTES, end - at)), at)
            if page.kind == _DICTIONARY_PAGE:
                dictionary = page
            elif page.kind in (_DATA_PAGE, _DATA_PAGE_V2):
                pages.append(page)
            at = page.offset + page.num_bytes
    starts = np.concatenate([[0], np.cumsum([page.num_values for page in pages], dtype=np.int64)])
    if starts[-1] != footer.row_group(group).num_rows:
        raise Unsupported("the pages do not add up to the row group")
    return PageTable(dictionary, pages, starts, _CODECS.get(chunk.compression), schema.max_definition_level)


def read_page(path: pathlib.Path, table: PageTable, number: int) -> PageValues:
    """Reads and decompresses one data page (and the dictionary, where the page refers to it).

    Raises:
        Unsupported: an unusual encoding.
        OSError, ValueError, pyarrow.ArrowException: the file is damaged.
    """
    page = source = table.pages[number]
    content = _content(path, page, table.codec)
    levels, values = _split(page, content, table.max_level)
    there = levels == table.max_level
    count = int(there.sum())
    if page.encoding == _PLAIN:
        data, found = values, _plain_places(values, count)
    elif page.encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY) and table.dictionary is not None:
        source = table.dictionary
        data = content = _content(path, source, table.codec)
        words = _plain_places(data, table.dictionary.num_values)
        found = words[_decode_hybrid(values[1:], values[0], count)] if count else np.zeros(0, np.int64)
    else:
        raise Unsupported(f"encoding {page.encoding}")
    places = np.full(page.num_values, -1, np.int64)
    places[there] = found
    return PageValues(data, places, source, content.nbytes - data.nbytes)


def read_ranges(path: pathlib.Path, table: PageTable, number: int) -> Ranges:
    """Where the values of one data page lie in the file. Reads the page once.

    Raises:
        Scattered: the page is compressed in a way that leaves no value whole.
        As `read_page`.
    """
    values = read_page(path, table, number)
    page = values.page
    head = page.levels_bytes or 0  # version 2 leaves the levels in front uncompressed
    if table.codec is None or not page.compressed:
        head, layout = 0, plain_layout(page.offset, page.num_bytes)
    elif table.codec == "snappy":
        layout = snappy_layout(_read(path, page)[head:], page.offset + head)
    else:
        raise Scattered
    words = np.where(values.places < 0, 0, values.places)
    lengths = np.array([int.from_bytes(values.data[at : at + 4], "little") for at in words.tolist()], np.int64)
    places = np.where(values.places < 0, -1, values.places + 4 + values.start - head)
    return collect(layout, places, lengths)


def _read(path: pathlib.Path, page: Page) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(page.offset)
        data = file.read(page.num_bytes)
    if len(data) != page.num_bytes:
        raise ValueError("the file ends within a page")
    return data


def _content(path: pathlib.Path, page: Page, codec: str | None) -> memoryview:
    data = _read(path, page)
    if codec is None or not page.compressed:
        return memoryview(data)
    head = page.levels_bytes or 0  # version 2 leaves the levels in front uncompressed
    raw = pa.decompress(memoryview(data)[head:], decompressed_size=page.num_raw_bytes - head, codec=codec)
    return memoryview(data[:head] + raw.to_pybytes()) if head else memoryview(raw).cast("B")


def _split(page: Page, content: memoryview, max_level: int) -> tuple[np.ndarray, memoryview]:
    """Definition levels (num_values,), and the values behind them."""
    if max_level == 0:
        return np.zeros(page.num_values, np.int64), content[page.levels_bytes or 0 :]
    if page.levels_bytes is not None:
        levels, values = content[: page.levels_bytes], content[page.levels_bytes :]
    else:
        length = int.from_bytes(content[:4], "little")
        levels, values = content[4 : 4 + length], content[4 + length :]
    return _decode_hybrid(levels, max_level.bit_length(), page.num_values), values


def _plain_places(data: memoryview, count: int) -> np.ndarray:
    places = np.empty(count, np.int64)
    at = 0
    for i in range(count):
        if at + 4 > data.nbytes:
            raise ValueError("a page holds fewer values than its header says")
        places[i] = at
        at += 4 + int.from_bytes(data[at : at + 4], "little")
    return places


def _decode_hybrid(data: memoryview, width: int, count: int) -> np.ndarray:
    """Runs of one value, and runs of bit-packed values: `count` numbers of `width` bits."""
    parts, at, got = [], 0, 0
    num_bytes = -(-width // 8)
    while got < count:
        header, at = read_varint(data, at)
        if header & 1:
            size = (header >> 1) * width
            bits = np.unpackbits(np.frombuffer(data[at : at + size], np.uint8), bitorder="little")
            numbers = bits[: len(bits) // max(width, 1) * width].reshape(-1, max(width, 1)) @ (1 << np.arange(width))
            at += size
        else:
            numbers = np.full(header >> 1, int.from_bytes(data[at : at + num_bytes], "little"), np.int64)
            at += num_bytes
        if not len(numbers):
            raise ValueError("an empty run in a page")
        parts.append(numbers)
        got += len(numbers)
    return np.concatenate(parts)[:count] if parts else np.zeros(0, np.int64)


def _parse_header(data: bytes, offset: int) -> Page:
    try:
        fields, size = _struct(memoryview(data), 0)
        kind = fields[1]
        head: dict[int, Any] = fields.get({_DATA_PAGE: 5, _DICTIONARY_PAGE: 7, _DATA_PAGE_V2: 8}.get(kind, 0), {})
        levels_bytes, encoding, compressed = None, head.get(2, _PLAIN), True
        if kind == _DATA_PAGE and head.get(3, _RLE) != _RLE:
            raise Unsupported("levels that are not run-length encoded")
        if kind == _DATA_PAGE_V2:
            encoding, levels_bytes, compressed = head[4], head[5] + head.get(6, 0), head.get(7, True)
        return Page(kind, encoding, offset + size, fields[3], fields[2], head.get(1, 0), levels_bytes, compressed)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Unsupported(f"a page header at {offset} that is not understood") from error


def _struct(data: memoryview, at: int) -> tuple[dict[int, Any], int]:
    """A Thrift struct in the compact protocol: field number -> value, and where it ends."""
    fields: dict[int, Any] = {}
    number = 0
    while (head := data[at]) != 0:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            raw, at = read_varint(data, at)
            number = (raw >> 1) ^ -(raw & 1)
        kind = head & 0x0F
        if kind in (1, 2):
            fields[number] = kind == 1
        elif kind in (3, 4, 5, 6):
            if kind == 3:
                fields[number], at = data[at], at + 1
            else:
                raw, at = read_varint(data, at)
                fields[number] = (raw >> 1) ^ -(raw & 1)
        elif kind == 8:
            size, at = read_varint(data, at)
            fields[number], at = None, at + size  # statistics; not needed
        elif kind == 12:
            fields[number], at = _struct(data, at)
        else:
            raise Unsupported(f"a page header with a field of kind {kind}")
    return fields, at + 1
