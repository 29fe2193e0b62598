"""Every shared dataset equals what lerobot's own readers returned for it, to the bit."""

import pathlib
import zlib

import numpy as np
import pytest

from openpi_accel.data.lerobot.dataset import LeRobotDataset, open_dataset

pytestmark = pytest.mark.shared

VERSIONS = {
    "libero_shaped_v20": "v2.0",
    "v20_image": "v2.0",
    "v21_image": "v2.1",
    "v21_video": "v2.1",
    "robosuite_lift_v21": "v2.1",
    "v30_image": "v3.0",
    "v30_video": "v3.0",
    "v30_converted_video": "v3.0",
    "robosuite_lift_v30": "v3.0",
}
TWINS = [("v21_image", "v30_image"), ("v21_video", "v30_converted_video")]
EQUAL_NUMBERS = [*TWINS, ("v21_video", "v30_video"), ("robosuite_lift_v21", "robosuite_lift_v30")]


def opened(shared: pathlib.Path, name: str) -> tuple[LeRobotDataset, dict[str, np.ndarray]]:
    with np.load(shared / "datasets" / "expected" / f"{name}.npz") as file:
        return open_dataset(shared / "datasets" / name), dict(file)


def keys(dataset: LeRobotDataset) -> tuple[str, str]:
    return ("state", "actions") if "state" in dataset.features else ("observation.state", "action")


def crc32(frames: list[np.ndarray]) -> list[int]:
    return [zlib.crc32(np.ascontiguousarray(frame).tobytes()) for frame in frames]


def test_all_shared_datasets_are_tried(shared: pathlib.Path) -> None:
    assert {path.stem for path in (shared / "datasets" / "expected").glob("*.npz")} == set(VERSIONS)


@pytest.mark.parametrize("name", VERSIONS)
def test_numbers_chunks_and_tasks(shared: pathlib.Path, name: str) -> None:
    dataset, expected = opened(shared, name)
    assert dataset.version == VERSIONS[name]
    state_key, action_key = keys(dataset)
    for rows_of in (np.arange, np.random.default_rng(0).permutation):
        order = rows_of(len(expected["index"]))
        rows = expected["index"][order]
        for key, column in (
            ("state", state_key),
            ("episode_index", "episode_index"),
            ("frame_index", "frame_index"),
            ("index", "index"),
        ):
            values = dataset.column(column)[rows]
            np.testing.assert_array_equal(values, expected[key][order])
            assert values.dtype == expected[key].dtype
        chunk, is_pad = dataset.chunk(action_key, rows, 10)
        np.testing.assert_array_equal(chunk, expected["action"][order])
        np.testing.assert_array_equal(is_pad, expected["action_is_pad"][order])
        assert dataset.task_of(rows) == expected["task"][order].tolist()


@pytest.mark.parametrize("name", VERSIONS)
def test_frames_in_order_and_at_random(shared: pathlib.Path, name: str) -> None:
    dataset, expected = opened(shared, name)
    cameras = [key.removeprefix("crc32/") for key in expected if key.startswith("crc32/")]
    assert set(cameras) == set(dataset.cameras)
    rows = expected["index"]
    batches = np.array_split(np.random.default_rng(0).permutation(len(rows)), -(-len(rows) // 32))
    for camera in cameras:
        frames = dataset.frames(camera, rows)
        assert all(frame.dtype == np.uint8 and frame.flags.c_contiguous for frame in frames)
        assert crc32(frames) == expected[f"crc32/{camera}"].tolist()
        np.testing.assert_array_equal(frames[0], expected[f"first_frame/{camera}"])
        means = np.array([frame.mean(axis=(0, 1), dtype=np.float64) for frame in frames])
        np.testing.assert_array_equal(means.astype(np.float32), expected[f"mean_rgb/{camera}"])
        for batch in batches:
            assert crc32(dataset.frames(camera, rows[batch])) == expected[f"crc32/{camera}"][batch].tolist()


@pytest.mark.parametrize(("one", "other"), EQUAL_NUMBERS)
def test_layouts_of_one_content_agree_in_numbers(shared: pathlib.Path, one: str, other: str) -> None:
    a, b = (open_dataset(shared / "datasets" / name) for name in (one, other))
    np.testing.assert_array_equal(a.episode_starts, b.episode_starts)
    for key in (*keys(a), "episode_index", "frame_index", "index", "timestamp"):
        np.testing.assert_array_equal(a.column(key), b.column(key))
    rows = np.arange(a.num_frames)
    assert a.task_of(rows) == b.task_of(rows)


@pytest.mark.parametrize(("one", "other"), TWINS)
def test_layouts_of_one_content_agree_in_pixels(shared: pathlib.Path, one: str, other: str) -> None:
    a, b = (open_dataset(shared / "datasets" / name) for name in (one, other))
    rows = np.random.default_rng(1).permutation(a.num_frames)
    for camera in a.cameras:
        assert crc32(a.frames(camera, rows)) == crc32(b.frames(camera, rows))


def test_fingerprints_differ(shared: pathlib.Path) -> None:
    prints = {name: open_dataset(shared / "datasets" / name).fingerprint() for name in VERSIONS}
    assert len(set(prints.values())) == len(VERSIONS)
    assert prints["v20_image"] == open_dataset(shared / "datasets" / "v20_image").fingerprint()
