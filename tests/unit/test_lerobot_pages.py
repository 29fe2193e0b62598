"""Single values from parquet pages equal Arrow's, for every layout that writers make; memory stays bounded."""

import os
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openpi_accel.data.lerobot import image_columns
from openpi_accel.data.lerobot.image_columns import ImageColumns
from openpi_accel.data.lerobot.pages import Unsupported, read_page, read_page_table
from openpi_accel.data.lerobot.segments import Scattered, snappy_layout
from openpi_accel.errors import UserError

LAYOUTS = {
    "as lerobot writes": dict(compression="snappy"),
    "uncompressed": dict(compression="none"),
    "zstd, version 2 pages": dict(compression="zstd", data_page_version="2.0"),
    "snappy, version 2 pages": dict(compression="snappy", data_page_version="2.0"),
    "gzip, no dictionary": dict(compression="gzip", use_dictionary=False),
    "plain, version 2 pages": dict(compression="none", use_dictionary=False, data_page_version="2.0"),
    "dictionary that overflows": dict(compression="snappy", dictionary_pagesize_limit=3000),
    "no statistics": dict(compression="snappy", write_statistics=False),
    "checksums": dict(compression="snappy", write_page_checksum=True),
    "page index": dict(compression="snappy", write_page_index=True),
}


def images(count: int, repeated: bool) -> list[bytes]:
    rng = np.random.default_rng(0)
    made = [rng.bytes(int(rng.integers(0, 900))) for _ in range(count)]
    return [made[i // 3] for i in range(count)] if repeated else made


def write(
    path: pathlib.Path, values: list[bytes | None], *, struct: bool = True, nullable: bool = True, **options: object
) -> None:
    column = pa.array(values, pa.binary())
    if struct:
        names = pa.array([f"{i}.png" for i in range(len(values))])
        column = pa.StructArray.from_arrays([column, names], names=["bytes", "path"])
    schema = pa.schema([pa.field("observation.image", column.type, nullable=nullable), pa.field("n", pa.int64())])
    table = pa.table([column, pa.array(range(len(values)))], schema=schema)
    pq.write_table(table, path, **{"row_group_size": 70, "data_page_size": 4000, "write_batch_size": 5} | options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("struct", [True, False])
def test_equals_arrow(tmp_path: pathlib.Path, layout: str, repeated: bool, struct: bool) -> None:
    values = images(200, repeated)
    write(tmp_path / "a.parquet", values, struct=struct, nullable=struct, **LAYOUTS[layout])
    footer = pq.read_metadata(tmp_path / "a.parquet")
    got = []
    for group in range(footer.num_row_groups):
        table = read_page_table(tmp_path / "a.parquet", footer, group, 0)
        pages = [read_page(tmp_path / "a.parquet", table, number) for number in range(len(table.pages))]
        got += [page.value(at) for page in pages for at in range(len(page.places))]
    assert got == values
    rows = np.random.default_rng(1).permutation(200)
    read = ImageColumns(tmp_path).read(tmp_path / "a.parquet", "observation.image", rows)
    assert read == [values[row] for row in rows]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nulls(tmp_path: pathlib.Path, layout: str) -> None:
    values = [None if i % 7 == 3 else value for i, value in enumerate(images(120, False))]
    write(tmp_path / "a.parquet", values, **LAYOUTS[layout])
    footer = pq.read_metadata(tmp_path / "a.parquet")
    table = read_page_table(tmp_path / "a.parquet", footer, 0, 0)
    pages = [read_page(tmp_path / "a.parquet", table, number) for number in range(len(table.pages))]
    assert [page.value(at) for page in pages for at in range(len(page.places))] == values[:70]
    with pytest.raises(UserError, match=r"3\.png is missing"):
        ImageColumns(tmp_path).read(tmp_path / "a.parquet", "observation.image", [3])


def test_a_row_costs_its_bytes_or_a_page_and_memory_is_bounded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = images(200, False)
    path = tmp_path / "a.parquet"
    counts = {"read_page": 0, "read_ranges": 0}

    def count(name: str) -> None:
        original = getattr(image_columns, name)

        def counted(*arguments: object) -> object:
            counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(image_columns, name, counted)

    for name in counts:
        count(name)
    monkeypatch.setattr(image_columns, "_read_chunk", None)
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: read.append(size) or pread(file, size, offset))
    write(path, values, compression="snappy", use_dictionary=False)
    columns = ImageColumns(tmp_path, max_layout_bytes=20_000)
    for _ in range(2):
        assert columns.read(path, "observation.image", [100]) == [values[100]]
    assert counts == {"read_page": 0, "read_ranges": 1}
    assert len(read) == 2 and all(len(values[100]) <= size <= len(values[100]) + 8 for size in read)
    assert columns.read(path, "observation.image", range(200)) == values
    assert counts["read_ranges"] < 40 and columns._ranges.size <= 20_000 and len(columns._ranges) > 1
    columns.clear()
    assert not len(columns._ranges) and not len(columns._files)

    write(path, values, compression="zstd", use_dictionary=False)
    columns = ImageColumns(tmp_path, max_bytes=20_000)
    assert columns.read(path, "observation.image", range(200)) == values
    assert 1 < counts["read_page"] < 40  # each page once, not each row
    assert columns._data.size <= 20_000 and 1 < len(columns._data) < 10


def test_snappy_streams_of_every_kind() -> None:
    rng = np.random.default_rng(0)
    contents = [
        rng.bytes(200_000),
        bytes(50_000),  # copies that reach into themselves
        (rng.bytes(3000) + b"abc" * 20) * 30,
        b"x",
        b"".join(rng.bytes(50) + bytes(10) for _ in range(200)),
    ]
    for content in contents:
        data = pa.compress(content, codec="snappy", asbytes=True)
        layout, file = snappy_layout(data, 1000), bytes(1000) + data
        assert layout.size == len(content)
        for _ in range(30):
            start, end = sorted(rng.integers(0, len(content) + 1, 2).tolist())
            end = min(end, start + 500)
            try:
                ranges = layout.ranges(start, end)
            except Scattered:
                continue
            assert b"".join(file[offset : offset + size] for offset, size in ranges) == content[start:end]
        with pytest.raises(ValueError, match="past the end"):
            layout.ranges(0, len(content) + 1)
        with pytest.raises((ValueError, IndexError)):
            snappy_layout(data[:-1], 0)
    with pytest.raises(Scattered):
        snappy_layout(pa.compress(b"".join(rng.bytes(9) + b"abcdefgh" for _ in range(9000)), "snappy", True), 0)


def test_unusual_layouts_go_through_arrow(tmp_path: pathlib.Path) -> None:
    values = images(50, False)
    options = dict(use_dictionary=False, column_encoding={"observation.image": "DELTA_LENGTH_BYTE_ARRAY"})
    write(tmp_path / "a.parquet", values, struct=False, **options)
    footer = pq.read_metadata(tmp_path / "a.parquet")
    with pytest.raises(Unsupported):
        read_page(tmp_path / "a.parquet", read_page_table(tmp_path / "a.parquet", footer, 0, 0), 0)
    assert ImageColumns(tmp_path).read(tmp_path / "a.parquet", "observation.image", [7, 3]) == [values[7], values[3]]
    with pytest.raises(Unsupported):
        read_page_table(tmp_path / "a.parquet", footer, 0, 1)


def test_damaged_pages_are_refused(tmp_path: pathlib.Path) -> None:
    values = images(60, False)
    path = tmp_path / "a.parquet"
    write(path, values, compression="snappy", use_dictionary=False)
    table = read_page_table(path, pq.read_metadata(path), 0, 0)
    whole = path.read_bytes()
    for damage in (b"\0" * 64, b"\xff" * 64):
        data = bytearray(whole)
        data[table.pages[1].offset : table.pages[1].offset + 64] = damage
        path.write_bytes(data)
        columns = ImageColumns(tmp_path)
        assert columns.read(path, "observation.image", [0]) == [values[0]]
        with pytest.raises(UserError, match=r"a\.parquet is damaged"):
            columns.read(path, "observation.image", [int(table.starts[1])])
