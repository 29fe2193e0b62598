"""The file that all processes of a machine map: equal values, never stale, never a reason to fail."""

import io
import os
import pathlib
import resource
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from openpi_accel.build.reading import ReadingBar
from openpi_accel.data.lerobot import mapped
from openpi_accel.data.lerobot.dataset import LeRobotDataset, open_dataset
from openpi_accel.data.lerobot.machine_cache import MachineCache, open_shared
from openpi_accel.data.worker_pool import ProcessPool
from openpi_accel.errors import UserError
from tests.conftest import REPO
from tests.lerobot_writer import write_dataset
from tests.pool_jobs import Looking

COLUMNS = ("observation.state", "action", "task_index")
SHARED = {
    "v20_image": COLUMNS,
    "libero_shaped_v20": ("state", "actions", "task_index"),
    "v21_image": COLUMNS,
    "v21_video": COLUMNS,
    "robosuite_lift_v21": COLUMNS,
    "v30_image": COLUMNS,
    "v30_video": COLUMNS,
    "v30_converted_video": COLUMNS,
    "robosuite_lift_v30": COLUMNS,
}


def opened(
    root: pathlib.Path, cache: pathlib.Path, columns: tuple[str, ...] = COLUMNS, said: list[str] | None = None
) -> tuple[LeRobotDataset, list[str]]:
    """The dataset, and of what the files were read."""
    read: list[str] = []

    def track(items, what):
        read.append(what)
        return items

    everything = MachineCache(folder=cache, min_files=0, min_bytes=0)
    said = [] if said is None else said
    return open_shared(root, lambda dataset: columns, everything, track=track, say=said.append), read


def set_column(file: pathlib.Path, key: str, values: pa.Array) -> None:
    """Another column in place of one, written as `write_dataset` writes."""
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.column_names.index(key), key, values), file, row_group_size=3)


def kept(cache: pathlib.Path) -> list[pathlib.Path]:
    """Every file below the cache folder."""
    return sorted(path for path in cache.rglob("*") if path.is_file())


def assert_equal(found: LeRobotDataset, root: pathlib.Path, columns: tuple[str, ...] = COLUMNS) -> None:
    """As when the dataset's own files are read, to the bit and the type."""
    plain = open_dataset(root)
    for key in columns:
        a, b = found.column(key), plain.column(key)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        assert not a.flags.writeable
    assert found.index.tasks == plain.index.tasks and found.index.info == plain.index.info
    assert found.index.data_files == plain.index.data_files
    for name in ("episode_ids", "episode_starts", "data_starts"):
        a, b = getattr(found.index, name), getattr(plain.index, name)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert found.index.clips.keys() == plain.index.clips.keys()
    for key, clips in plain.index.clips.items():
        assert found.index.clips[key].files == clips.files
        np.testing.assert_array_equal(found.index.clips[key].file_of, clips.file_of)
        np.testing.assert_array_equal(found.index.clips[key].from_s, clips.from_s)
    assert found.fingerprint() == plain.fingerprint()
    rows = np.arange(plain.num_frames)[::3]
    assert found.task_of(rows) == plain.task_of(rows)


@pytest.mark.shared
@pytest.mark.parametrize("name", SHARED)
def test_the_same_values_and_frames(shared: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    root, columns = shared / "datasets" / name, SHARED[name]
    first, read = opened(root, tmp_path, columns)
    assert read == ["the dataset's index", *(f"column {key}" for key in columns)]
    again, read = opened(root, tmp_path, columns)
    assert read == []
    for dataset in (first, again):
        assert_equal(dataset, root, columns)
        assert str(kept(tmp_path)[0]) in dataset.memory
        rows = np.array([0, dataset.num_frames - 1])
        for camera in dataset.cameras:
            for a, b in zip(dataset.frames(camera, rows), open_dataset(root).frames(camera, rows), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float16", "float32", "float64"])
def test_every_type_of_number_to_the_bit(tmp_path: pathlib.Path, dtype: str) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "d"))
    values = np.frombuffer(np.random.default_rng(0).bytes(8 * 6 * np.dtype(dtype).itemsize), dtype)
    columns = {"flat": values[:8], "square": values.reshape(8, 3, 2), "columns": values.reshape(6, 8).T}
    mapped.write_mapped(tmp_path / "f.arrow", dataset.root, dataset.index, columns, [])
    found = mapped.read_mapped(tmp_path / "f.arrow", dataset.root, dataset.index.info, check=True)
    assert found is not None and list(found.columns) == list(columns)
    for key, array in columns.items():  # NaNs of every payload among them
        assert found.columns[key].dtype == array.dtype and found.columns[key].shape == array.shape
        assert found.columns[key].tobytes() == array.tobytes()


def test_what_is_not_a_plain_number_stays_as_it_is(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d")
    for file, length in zip(open_dataset(root).index.data_files, (5, 3), strict=True):
        set_column(file, "subtask", pa.array([True, False, True, True, False][:length]))
    dataset, _ = opened(root, tmp_path / "c", ("action", "subtask"))
    assert kept(tmp_path / "c") == [] and "in each process" in dataset.memory
    assert dataset.column("subtask").tolist() == [True, False, True, True, False, True, False, True]
    assert_equal(dataset, root, ("action", "subtask"))


def test_a_small_dataset_leaves_no_file(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", lengths=[2] * 5)
    for min_files, min_bytes, num_kept in ((6, 1 << 20, 0), (5, 1 << 20, 1), (6, 1, 1)):
        cache = tmp_path / f"c{min_files}{min_bytes}"
        limits = MachineCache(folder=cache, min_files=min_files, min_bytes=min_bytes)
        dataset = open_shared(root, lambda dataset: COLUMNS, limits)
        assert len(kept(cache)) == num_kept
        assert_equal(dataset, root)


def test_further_columns_are_added(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d")
    opened(root, tmp_path / "c", ("action",))
    _, read = opened(root, tmp_path / "c")
    assert read == [f"column {key}" for key in COLUMNS if key != "action"]  # the index and the actions are there
    assert opened(root, tmp_path / "c")[1] == opened(root, tmp_path / "c", ("action",))[1] == []
    assert len(kept(tmp_path / "c")) == 1


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("what", ["in place", "text of a task", "more episodes"])
def test_a_changed_dataset_is_read_again(tmp_path: pathlib.Path, version: str, what: str) -> None:
    root, cache = write_dataset(tmp_path / "d", version=version), tmp_path / "c"
    plain = open_dataset(root)
    data, shape = plain.index.data_files[0], (int(plain.index.data_starts[1]), 2)

    def write_actions(values: np.ndarray) -> None:
        set_column(data, "action", pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 2))

    write_actions(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    before, _ = opened(root, cache)
    old, fingerprint = before.column("action").copy(), before.fingerprint()
    if what == "in place":  # of the same length, and the meta files as they were
        write_actions(np.random.default_rng(1).standard_normal(shape).astype(np.float32))
        assert open_dataset(root).fingerprint() == fingerprint  # which does not see it
    else:
        changed = {"tasks": ("fold", "iron")} if what == "text of a task" else {"lengths": (5, 3, 4)}
        os.rename(root, tmp_path / "gone")
        write_dataset(root, version=version, **changed)
    after, read = opened(root, cache)
    assert read
    assert_equal(after, root)
    assert after.tasks != before.tasks or not np.array_equal(after.column("action"), old)
    np.testing.assert_array_equal(before.column("action"), old)  # what was mapped before stays whole
    assert opened(root, cache)[1] == []


def test_a_missing_data_file_is_told_as_ever(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d")
    dataset, _ = opened(root, tmp_path / "c")
    dataset.index.data_files[1].unlink()
    with pytest.raises(UserError, match="episode_000001.parquet is missing"):
        opened(root, tmp_path / "c")


def _flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: b"",
        lambda c: c[: len(c) // 2],
        lambda c: c[:-1],
        lambda c: _flip(c, c.find(np.float32([1, -1]).tobytes())),  # a number
        lambda c: _flip(c, c.rfind(b"stack the cups")),  # a task; Arrow reads the second copy of the schema
        lambda c: c.replace(b"crc32", b"crc33"),
        lambda c: bytes(len(c)),
    ],
)
def test_a_damaged_file_is_said_and_made_anew(tmp_path: pathlib.Path, damage) -> None:
    root, cache = write_dataset(tmp_path / "d"), tmp_path / "c"
    opened(root, cache)
    (file,) = kept(cache)
    good = file.read_bytes()
    bad = damage(good)
    assert bad != good
    aside = tmp_path / "bad"
    aside.write_bytes(bad)
    os.replace(aside, file)
    said: list[str] = []
    dataset, read = opened(root, cache, said=said)
    assert len(said) == 1 and said[0].startswith(f"{file} cannot be used (") and "\n" not in said[0]
    assert "the dataset's index" in read
    assert_equal(dataset, root)
    assert kept(cache) == [file] and file.read_bytes() == good


def test_any_flipped_bit_is_noticed_or_without_effect(tmp_path: pathlib.Path) -> None:
    root, cache = write_dataset(tmp_path / "d"), tmp_path / "c"
    dataset, _ = opened(root, cache)
    (file,) = kept(cache)
    good, noticed = file.read_bytes(), 0
    for at in np.random.default_rng(0).choice(len(good), 300, replace=False).tolist():
        aside = tmp_path / "bad"
        aside.write_bytes(_flip(good, at))
        try:
            found = mapped.read_mapped(aside, root, dataset.index.info, check=True)
        except mapped.Damaged:
            noticed += 1
            continue
        assert found is not None
        for key in COLUMNS:
            np.testing.assert_array_equal(found.columns[key], dataset.column(key))
        assert found.index.tasks == dataset.tasks
    assert noticed > 100


def test_without_a_folder_to_write_to(tmp_path: pathlib.Path) -> None:
    root, blocked, said = write_dataset(tmp_path / "d"), tmp_path / "file", []
    blocked.write_text("no folder")
    dataset, _ = opened(root, blocked / "c", said=said)
    assert len(said) == 1 and "Not a directory" in said[0] and "OPENPI_CACHE_HOME" in said[0]
    assert "in each process" in dataset.memory
    assert_equal(dataset, root)


def test_on_a_full_disk(tmp_path: pathlib.Path) -> None:
    root, cache, said = write_dataset(tmp_path / "d"), tmp_path / "c", []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # a write beyond fails, as on a full disk
    try:
        dataset, _ = opened(root, cache, said=said)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(said) == 1 and "File too large" in said[0]
    assert kept(cache) == []
    assert_equal(dataset, root)


def test_the_files_used_last_are_kept(tmp_path: pathlib.Path) -> None:
    root, cache = write_dataset(tmp_path / "d"), tmp_path / "c"
    opened(root, cache)
    (file,) = kept(cache)
    for number in range(12):
        (file.parent / f"{number:02d}.arrow").write_bytes(b"")
        os.utime(file.parent / f"{number:02d}.arrow", (number, number))
    (file.parent / ".old.tmp").write_bytes(b"")
    os.utime(file.parent / ".old.tmp", (0, 0))
    (file.parent / ".new.tmp").write_bytes(b"")  # another process is writing it
    os.utime(file, (11.5, 11.5))
    opened(root, cache)  # used, and so younger again
    assert file.stat().st_mtime > 12
    file.unlink()
    opened(root, cache)
    names = [path.name for path in kept(cache)]
    assert sorted(names) == sorted([".new.tmp", *(f"{number:02d}.arrow" for number in range(5, 12)), file.name])


_BUILDER = """
import pathlib, sys
from openpi_accel.data.lerobot.machine_cache import MachineCache, open_shared

root, cache = map(pathlib.Path, sys.argv[1:3])
print("ready", flush=True)
for line in sys.stdin:
    said = []
    limits = MachineCache(folder=cache / line.strip(), min_files=0)
    found = open_shared(root, lambda dataset: sys.argv[3:], limits, say=said.append)
    whole = (found.column("action")[:, 0] == range(800)).all() and "one copy" in found.memory
    print(whole and not said, flush=True)
"""


def test_two_builders_at_once(tmp_path: pathlib.Path) -> None:
    root, cache, pipe = write_dataset(tmp_path / "d", lengths=[40] * 20), tmp_path / "c", subprocess.PIPE
    start = [sys.executable, "-c", _BUILDER, str(root), str(cache), *COLUMNS]
    builders = [subprocess.Popen(start, stdin=pipe, stdout=pipe, text=True, cwd=REPO) for _ in range(2)]
    answers = [builder.stdout for builder in builders if builder.stdout is not None]
    orders = [builder.stdin for builder in builders if builder.stdin is not None]
    try:
        assert [answer.readline() for answer in answers] == ["ready\n"] * 2
        for number in range(20):
            for order in orders:
                order.write(f"{number}\n")
                order.flush()
            assert [answer.readline() for answer in answers] == ["True\n"] * 2
    finally:
        for builder in builders:
            builder.kill()
            builder.communicate()
    assert len(kept(cache)) == 20  # one each, and nothing beside
    assert len({file.read_bytes() for file in kept(cache)}) == 1
    assert opened(root, cache / "0")[1] == []


def test_workers_map_the_file_that_the_trainer_maps(tmp_path: pathlib.Path) -> None:
    root, cache = write_dataset(tmp_path / "d", lengths=[40] * 5), tmp_path / "c"
    dataset, _ = opened(root, cache)
    (file,) = kept(cache)
    inode = file.stat().st_ino
    with_pool = ProcessPool(Looking(dataset, COLUMNS), 2)
    try:
        rows = np.array([7, 199, 0])
        looks = [with_pool.submit(rows) for _ in range(6)]
        found = [look.result(timeout=60) for look in looks]
    finally:
        with_pool.close()
    for look in found:
        assert look["pid"] != os.getpid()
        assert look["mapped"] == {str(file): inode}
        assert look["inside"] == {key: True for key in COLUMNS}  # the arrays lie in the mapping, not in copies
        np.testing.assert_array_equal(look["action"], open_dataset(root).column("action")[rows])


def test_a_worker_without_the_file_reads_the_dataset(tmp_path: pathlib.Path) -> None:
    root, cache = write_dataset(tmp_path / "d"), tmp_path / "c"
    dataset, _ = opened(root, cache)
    for file in kept(cache):
        file.unlink()
    reopen, arguments = dataset.__reduce__()
    again = reopen(*arguments)
    assert "in each process" in again.memory
    assert_equal(again, root)


def test_reading_is_shown_once_it_takes_long() -> None:
    def shown(*, terminal: bool, **options) -> str:
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
        with ReadingBar(console, **options) as bar:
            assert list(bar.track([3, 4, 5], "the index")) == [3, 4, 5]
            assert list(bar.track([1, 2], "column x")) == [1, 2]
            bar.say("a [sentence]")
        return console.file.getvalue()

    assert shown(terminal=False, patience_s=-1) == "reading the index and what follows of 3 files\na [sentence]\n"
    assert shown(terminal=False, patience_s=60) == "a [sentence]\n"
    assert shown(terminal=True, patience_s=60) == "a [sentence]\n"
    assert shown(terminal=True, patience_s=-1, quiet=True) == ""
    drawn = shown(terminal=True, patience_s=-1)
    assert "reading the index" in drawn and "3/3" in drawn and "2/2" in drawn
