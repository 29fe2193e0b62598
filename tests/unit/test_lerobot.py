"""The reader on datasets written here: every layout, odd frame rates, odd orders, extra columns, missing pixels."""

import fractions
import io
import json
import pathlib
import pickle
import shutil
import threading

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openpi_accel.data.lerobot.dataset import open_dataset
from tests.lerobot_writer import CAMERA, number_of, numbered_frame, png, write_dataset

NTSC = fractions.Fraction(30000, 1001)
LAYOUTS = [(version, kind) for version in ("v2.0", "v2.1", "v3.0") for kind in ("image", "video")]


@pytest.mark.parametrize(("version", "kind"), LAYOUTS)
@pytest.mark.parametrize("fixed_size", [True, False])
def test_layouts(tmp_path: pathlib.Path, version: str, kind: str, fixed_size: bool) -> None:
    root = write_dataset(tmp_path / "d", version=version, kind=kind, lengths=(5, 3, 4), fixed_size=fixed_size)
    dataset = open_dataset(root)
    assert (dataset.version, dataset.fps, dataset.num_frames, dataset.num_episodes) == (version, 10, 12, 3)
    assert dataset.cameras[CAMERA].kind == kind
    assert (dataset.cameras[CAMERA].height, dataset.cameras[CAMERA].width) == (16, 128)
    assert dataset.codec_of(CAMERA) == ("png" if kind == "image" else "h264")
    assert dataset.episode_starts.tolist() == [0, 5, 8, 12]
    rows = np.arange(12)
    state = dataset.column("observation.state")
    assert state.dtype == np.float32
    np.testing.assert_array_equal(state[:, 2], rows)
    np.testing.assert_array_equal(state[:, 0], dataset.column("episode_index"))
    np.testing.assert_array_equal(state[:, 1], dataset.column("frame_index"))
    assert dataset.task_of(np.array([6, 0])) == ["open the drawer", "stack the cups"]
    order = [7, 0, 11, 7, 3, 4]
    assert [number_of(frame) for frame in dataset.frames(CAMERA, np.array(order))] == order
    assert dataset.frames(CAMERA, np.array([], np.int64)) == []


def test_chunks_stop_at_the_end_of_the_episode(tmp_path: pathlib.Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "d", lengths=(5, 3)))
    chunk, is_pad = dataset.chunk("action", np.array([3, 7, 0]), 4)
    assert chunk[:, :, 0].tolist() == [[3, 4, 4, 4], [7, 7, 7, 7], [0, 1, 2, 3]]
    assert is_pad.tolist() == [[False, False, True, True], [False, True, True, True], [False] * 4]
    assert chunk.shape == (3, 4, 2) and chunk.dtype == np.float32
    chunk, _ = dataset.chunk("frame_index", np.array([3]), 3)
    assert chunk.tolist() == [[[3], [4], [4]]]


def test_columns_are_read_only_and_kept(tmp_path: pathlib.Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "d"))
    assert dataset.column("action") is dataset.column("action")
    with pytest.raises(ValueError, match="read-only"):
        dataset.column("action")[0] = 1


@pytest.mark.parametrize(("version", "kind"), LAYOUTS)
def test_numbers_need_no_pixels(tmp_path: pathlib.Path, version: str, kind: str) -> None:
    root = write_dataset(tmp_path / "d", version=version, kind=kind)
    shutil.rmtree(root / "videos", ignore_errors=True)
    if kind == "image":
        for path in root.glob("data/*/*.parquet"):
            pq.write_table(pq.read_table(path).drop_columns([CAMERA]), path)
    dataset = open_dataset(root)
    assert dataset.column("observation.state").shape == (8, 3)
    assert dataset.chunk("action", np.arange(8), 3)[0].shape == (8, 3, 2)
    assert len(dataset.fingerprint()) == 64


def test_fifty_clips_of_an_odd_frame_rate_in_one_file(tmp_path: pathlib.Path) -> None:
    lengths = [7 + i % 5 for i in range(50)]
    root = write_dataset(
        tmp_path / "d",
        version="v3.0",
        kind="video",
        lengths=lengths,
        fps=29.97,
        rate=NTSC,
        gop=250,
        episodes_per_file=20,
    )
    dataset = open_dataset(root)
    assert dataset.fps == 29.97
    rows = np.random.default_rng(0).permutation(dataset.num_frames)
    assert [number_of(frame) for frame in dataset.frames(CAMERA, rows)] == rows.tolist()


@pytest.mark.parametrize("declared_fps", [30, 29.97])
def test_clips_between_frames_of_no_episode(tmp_path: pathlib.Path, declared_fps: float) -> None:
    lengths = [40 + i % 7 for i in range(30)]
    root = write_dataset(
        tmp_path / "d", version="v3.0", kind="video", lengths=lengths, fps=declared_fps, rate=NTSC, gop=250, gap=11
    )
    dataset = open_dataset(root)
    rows = np.random.default_rng(0).permutation(dataset.num_frames)[:200]
    assert [number_of(frame) for frame in dataset.frames(CAMERA, rows)] == rows.tolist()


@pytest.mark.parametrize("kind", ["image", "video"])
def test_episodes_stored_out_of_order(tmp_path: pathlib.Path, kind: str) -> None:
    root = write_dataset(
        tmp_path / "d", version="v3.0", kind=kind, lengths=(5, 3, 4), physical_order=(2, 0, 1), first_index=100
    )
    dataset = open_dataset(root)
    assert dataset.episode_ids.tolist() == [2, 0, 1]
    assert dataset.episode_starts.tolist() == [0, 4, 9, 12]
    assert dataset.column("index").tolist() == list(range(100, 112))
    assert dataset.column("episode_index").tolist() == [2] * 4 + [0] * 5 + [1] * 3
    assert [number_of(frame) for frame in dataset.frames(CAMERA, np.arange(12))] == list(range(12))
    assert dataset.chunk("action", np.array([3]), 2)[0][0, :, 0].tolist() == [3, 3]


def test_episode_numbers_with_gaps(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", lengths=(5, 3, 4))
    (root / "data/chunk-000/episode_000001.parquet").unlink()
    lines = (root / "meta/episodes.jsonl").read_text().splitlines()
    (root / "meta/episodes.jsonl").write_text("\n".join([lines[2], "", lines[0]]) + "\n")
    edit_info(root, total_episodes=2, total_frames=9)
    dataset = open_dataset(root)
    assert dataset.episode_ids.tolist() == [0, 2]
    assert [number_of(frame) for frame in dataset.frames(CAMERA, np.array([4, 5]))] == [4, 8]


@pytest.mark.parametrize("name", ["task", "__index_level_0__"])
def test_task_table_column(tmp_path: pathlib.Path, name: str) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "d", version="v3.0", task_column=name))
    assert dataset.tasks == {0: "stack the cups", 1: "open the drawer"}


def test_shape_one_may_be_a_number_or_a_list(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d")
    info = json.loads((root / "meta/info.json").read_text())
    edit_info(root, features=info["features"] | {"grip": {"dtype": "float32", "shape": [1], "names": None}})
    for i, path in enumerate(sorted(root.glob("data/*/*.parquet"))):
        table = pq.read_table(path)
        values = np.arange(table.num_rows, dtype=np.float32)
        column = pa.array(values) if i else pa.array([[v] for v in values.tolist()], pa.list_(pa.float32()))
        timestamps = pa.array([[0.5]] * table.num_rows, pa.list_(pa.float32()))
        table = table.append_column("grip", column).drop_columns(["timestamp"]).append_column("timestamp", timestamps)
        pq.write_table(table, path)
    dataset = open_dataset(root)
    assert dataset.column("grip")[:, 0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert dataset.column("timestamp").tolist() == [0.5] * 8


def test_channels_first_and_unnamed_shapes(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d")
    info = json.loads((root / "meta/info.json").read_text())
    for shape, names in (([3, 16, 128], ["channels", "height", "width"]), ([3, 16, 128], None), ([16, 128, 3], None)):
        info["features"][CAMERA] |= {"shape": shape, "names": names}
        edit_info(root, features=info["features"])
        camera = open_dataset(root).cameras[CAMERA]
        assert (camera.height, camera.width) == (16, 128)


def test_images_that_are_files_or_plain_bytes(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", lengths=(2, 2))
    files = sorted(root.glob("data/*/*.parquet"))
    for row in (0, 1):
        (root / f"{row}.png").write_bytes(png(numbered_frame(row)))
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    as_files = pa.array([{"bytes": None, "path": f"{row}.png"} for row in (0, 1)], kind)
    as_bytes = pa.array([png(numbered_frame(row)) for row in (2, 3)], pa.binary())
    for path, column in zip(files, (as_files, as_bytes), strict=True):
        pq.write_table(pq.read_table(path).drop_columns([CAMERA]).append_column(CAMERA, column), path)
    assert [number_of(frame) for frame in open_dataset(root).frames(CAMERA, np.array([3, 1, 0, 2]))] == [3, 1, 0, 2]


def test_jpeg_in_parquet(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", lengths=(2,))
    data = io.BytesIO()
    PIL.Image.fromarray(numbered_frame(77)).save(data, "jpeg")
    column = pa.array([{"bytes": data.getvalue(), "path": None}] * 2)
    path = next(root.glob("data/*/*.parquet"))
    pq.write_table(pq.read_table(path).drop_columns([CAMERA]).append_column(CAMERA, column), path)
    dataset = open_dataset(root)
    assert number_of(dataset.frames(CAMERA, np.array([1]))[0]) == 77
    assert dataset.codec_of(CAMERA) == "jpeg"


def test_threads_read_one_dataset(tmp_path: pathlib.Path) -> None:
    roots = [write_dataset(tmp_path / kind, kind=kind, lengths=(20, 15)) for kind in ("image", "video")]
    datasets, wrong = [open_dataset(root) for root in roots], []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(10):
            rows = rng.permutation(35)[:8]
            for dataset in datasets:
                if [number_of(frame) for frame in dataset.frames(CAMERA, rows)] != rows.tolist():
                    wrong.append(rows)
                dataset.column("action"), dataset.task_of(rows)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for dataset in datasets:
        dataset.close()
        assert number_of(dataset.frames(CAMERA, np.array([9]))[0]) == 9


def test_travels_to_another_process(tmp_path: pathlib.Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "d", kind="video"))
    assert number_of(dataset.frames(CAMERA, np.array([3]))[0]) == 3
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.fingerprint() == dataset.fingerprint()
    assert number_of(copy.frames(CAMERA, np.array([6]))[0]) == 6


def test_fingerprint_follows_the_content(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", kind="video")
    before = open_dataset(root).fingerprint()
    shutil.copytree(root, tmp_path / "copy")
    assert open_dataset(tmp_path / "copy").fingerprint() == before
    video = next(root.glob("videos/*/*/*.mp4"))
    video.write_bytes(video.read_bytes() + b"x")
    assert open_dataset(root).fingerprint() != before


def edit_info(root: pathlib.Path, **changes: object) -> None:
    path = root / "meta" / "info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
