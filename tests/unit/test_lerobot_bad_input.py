"""Whatever is wrong with a dataset is one message that names the file, or the episode, frame and camera."""

import json
import pathlib
import re
import shutil
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openpi_accel.data.lerobot.dataset import LeRobotDataset, open_dataset
from openpi_accel.data.lerobot.frames import FrameError
from openpi_accel.errors import UserError
from tests.lerobot_writer import CAMERA, number_of, write_dataset


def edit_info(root: pathlib.Path, **changes: object) -> None:
    path = root / "meta" / "info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_table(path: pathlib.Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 5])


def assert_refused(root: pathlib.Path, *words: str) -> None:
    with pytest.raises(UserError) as error:
        open_dataset(root)
    for word in words:
        assert word in str(error.value)


def data_file(root: pathlib.Path, number: int = 0) -> pathlib.Path:
    return sorted(root.glob("data/*/*.parquet"))[number]


def test_no_folder(tmp_path: pathlib.Path) -> None:
    assert_refused(tmp_path / "none", "There is no folder", "none")


def test_empty_folder(tmp_path: pathlib.Path) -> None:
    assert_refused(tmp_path, str(tmp_path), "is empty")


def test_a_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    assert_refused(tmp_path / "a.txt", "is a file")


def test_a_folder_of_something_else(tmp_path: pathlib.Path) -> None:
    (tmp_path / "notes.txt").write_text("words")
    assert_refused(tmp_path, "has no meta/info.json")


def test_the_parent_of_datasets(tmp_path: pathlib.Path) -> None:
    write_dataset(tmp_path / "org" / "one")
    write_dataset(tmp_path / "org" / "two")
    assert_refused(tmp_path / "org", "holds 2", str(tmp_path / "org" / "one"))
    assert_refused(tmp_path, "holds 2", str(tmp_path / "org" / "two"))


@pytest.mark.parametrize("part", ["meta", "data", "data/chunk-000"])
def test_a_part_of_a_dataset(tmp_path: pathlib.Path, part: str) -> None:
    root = write_dataset(tmp_path / "d")
    assert_refused(root / part, "is a part of a dataset", f"folder: {root}")


@pytest.mark.parametrize("text", ["", "{", '{"codebase_version": "v2.1",', "\xff\xfe"])
def test_info_that_is_not_json(tmp_path: pathlib.Path, text: str) -> None:
    root = write_dataset(tmp_path / "d")
    (root / "meta/info.json").write_bytes(text.encode("latin1"))
    assert_refused(root, "info.json", "not readable as JSON")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codebase_version": "v1.6"}, ("v1.6", "v2.0, v2.1, v3.0")),
        ({"codebase_version": "v4.0"}, ("v4.0", "v2.0, v2.1, v3.0")),
        ({"codebase_version": None}, ("no codebase_version",)),
        ({"features": None}, ("no features",)),
        ({"features": {"action": {"dtype": "float32"}}}, ("'action'", "shape")),
        ({"features": {"cam": {"dtype": "video", "shape": [3], "names": None}}}, ("'cam'",)),
        ({"fps": 0}, ("fps",)),
        ({"fps": "ten"}, ("fps", "'ten'")),
        ({"data_path": None}, ("data_path",)),
        ({"data_path": "data/{nonsense}.parquet"}, ("data_path", "nonsense")),
        ({"total_frames": 9}, ("info.json declares total_frames 9", "lists 8")),
        ({"total_episodes": 3}, ("info.json declares total_episodes 3", "lists 2")),
    ],
)
@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_info_that_says_something_else(tmp_path: pathlib.Path, version: str, changes: dict, words: tuple[str]) -> None:
    root = write_dataset(tmp_path / "d", version=version)
    edit_info(root, **changes)
    assert_refused(root, "info.json", *words)


def test_info_that_is_a_list(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d")
    (root / "meta/info.json").write_text("[]")
    assert_refused(root, "info.json", "no features")


@pytest.mark.parametrize(
    ("version", "file"),
    [
        ("v2.0", "meta/episodes.jsonl"),
        ("v2.0", "meta/tasks.jsonl"),
        ("v2.1", "data/chunk-000/episode_000001.parquet"),
        ("v3.0", "meta/tasks.parquet"),
        ("v3.0", "data/chunk-000/file-000.parquet"),
    ],
)
@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_missing_and_truncated_files(tmp_path: pathlib.Path, version: str, file: str, damage: str) -> None:
    root = write_dataset(tmp_path / "d", version=version)
    if damage == "missing":
        (root / file).unlink()
        assert_refused(root, file, "missing")
    else:
        cut(root / file)
        assert_refused(root, file)


def test_no_episode_table(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", version="v3.0")
    shutil.rmtree(root / "meta/episodes")
    assert_refused(root, "meta/episodes", "no parquet files")


def test_no_episodes_at_all(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d")
    (root / "meta/episodes.jsonl").write_text("")
    edit_info(root, total_frames=0, total_episodes=0)
    assert_refused(root, "episodes.jsonl", "empty")


@pytest.mark.parametrize("line", ['{"episode_index": 0, "length": 5}', '{"episode_index": 7}', "3", "{"])
def test_a_bad_line_in_the_episode_list(tmp_path: pathlib.Path, line: str) -> None:
    root = write_dataset(tmp_path / "d")
    with (root / "meta/episodes.jsonl").open("a") as file:
        file.write(line + "\n")
    assert_refused(root, "episodes.jsonl")


def test_rows_and_declared_length_disagree(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d")
    edit_table(data_file(root, 1), lambda table: table.slice(0, 2))
    assert_refused(root, "episode_000001.parquet has 2 rows", "says 3")
    root = write_dataset(tmp_path / "d3", version="v3.0")
    edit_table(data_file(root), lambda table: table.slice(0, 7))
    assert_refused(root, "file-000.parquet holds 2 rows of episode 1", "says 3")


def test_episode_that_is_not_in_its_file(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", version="v3.0")
    edit_table(data_file(root), lambda table: table.slice(0, 5))
    assert_refused(root, "file-000.parquet lacks episode 1")


def test_rows_of_an_episode_apart_from_each_other(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", version="v3.0")
    edit_table(data_file(root), lambda table: table.take([0, 1, 5, 6, 7, 2, 3, 4]))
    assert_refused(root, "file-000.parquet", "episode 0 are not next to each other")


def test_video_camera_without_videos(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", version="v3.0", kind="video")
    edit_table(
        root / "meta/episodes/chunk-000/file-000.parquet",
        lambda table: table.select([name for name in table.column_names if not name.startswith("videos/")]),
    )
    assert_refused(root, f"videos/{CAMERA}/chunk_index")
    root = write_dataset(tmp_path / "d2", kind="video")
    edit_info(root, video_path=None)
    assert_refused(root, "video_path")


def test_unknown_columns_cameras_and_rows(tmp_path: pathlib.Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "d"))
    with pytest.raises(UserError, match=r"no column 'torque'.*observation\.state"):
        dataset.column("torque")
    with pytest.raises(UserError, match="is a camera"):
        dataset.column(CAMERA)
    with pytest.raises(UserError, match=re.escape(f"no camera 'left'. Its cameras are: {CAMERA}")):
        dataset.frames("left", np.array([0]))
    for row in (-1, 8):
        with pytest.raises(UserError, match=f"rows 0 to 7; row {row} is not there"):
            dataset.frames(CAMERA, np.array([3, row]))
        with pytest.raises(UserError, match=f"row {row} is not there"):
            dataset.chunk("action", np.array([row]), 2)


def test_declared_camera_without_a_column(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d")
    edit_table(data_file(root), lambda table: table.drop_columns([CAMERA]))
    with pytest.raises(
        FrameError, match=rf"episode 0, frame 2, camera {CAMERA}: .*episode_000000.parquet has no column"
    ):
        open_dataset(root).frames(CAMERA, np.array([2]))


def with_action(root: pathlib.Path, values: list[list[float] | None]) -> LeRobotDataset:
    column = pa.array(values, pa.list_(pa.float32()))
    edit_table(data_file(root, 1), lambda table: table.drop_columns(["action"]).append_column("action", column))
    return open_dataset(root)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([[1, 2], [3], [4, 5]], "has 1 values in row 1, but 2 in row 0"),
        ([[1, 2], None, [4, 5]], "no value in row 1"),
        ([[1, 2, 3]] * 3, "shape (3,), but meta/info.json declares (2,)"),
    ],
)
def test_values_of_odd_shapes(tmp_path: pathlib.Path, values: list, words: str) -> None:
    dataset = with_action(write_dataset(tmp_path / "d"), values)
    with pytest.raises(UserError, match=re.escape(words)):
        dataset.column("action")


def test_task_that_is_not_in_the_table(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", tasks=("one", "two"))
    (root / "meta/tasks.jsonl").write_text('{"task_index": 0, "task": "one"}\n')
    dataset = open_dataset(root)
    assert dataset.task_of(np.array([0])) == ["one"]
    with pytest.raises(UserError, match="row 6 has task_index 1"):
        dataset.task_of(np.array([0, 6]))


def test_damaged_image_names_its_place(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d")

    def damage(table: pa.Table) -> pa.Table:
        images = table.column(CAMERA).to_pylist()
        images[1]["bytes"] = images[1]["bytes"][:60]
        images[2] = {"bytes": None, "path": None}
        return table.drop_columns([CAMERA]).append_column(CAMERA, pa.array(images))

    edit_table(data_file(root, 1), damage)
    dataset = open_dataset(root)
    with pytest.raises(
        FrameError, match=r"episode 1, frame 1, camera .*not a whole image.*episode_000001\.parquet"
    ) as error:
        dataset.frames(CAMERA, np.array([0, 6]))
    assert (error.value.row, error.value.episode, error.value.frame, error.value.camera) == (6, 1, 1, CAMERA)
    with pytest.raises(FrameError, match=r"frame 2, .*no image in row 2"):
        dataset.frames(CAMERA, np.array([7]))
    assert number_of(dataset.frames(CAMERA, np.array([5]))[0]) == 5


def test_image_file_that_is_missing(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d")
    column = pa.array(
        [{"bytes": None, "path": "images/x.png"}] * 5, pa.struct({"bytes": pa.binary(), "path": pa.string()})
    )
    edit_table(data_file(root), lambda table: table.drop_columns([CAMERA]).append_column(CAMERA, column))
    with pytest.raises(FrameError, match=r"images/x\.png is missing"):
        open_dataset(root).frames(CAMERA, np.array([1]))


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_missing_and_truncated_videos(tmp_path: pathlib.Path, version: str) -> None:
    root = write_dataset(tmp_path / "d", version=version, kind="video")
    video = sorted(root.glob("videos/**/*.mp4"))[0]
    cut(video)
    with pytest.raises(FrameError, match=rf"episode 0, frame 2, camera {CAMERA}: .*{video.name}.*damaged or cut short"):
        open_dataset(root).frames(CAMERA, np.array([2]))
    video.unlink()
    with pytest.raises(FrameError, match=rf"episode 0, frame 2, .*{video.name}: this video file is missing"):
        open_dataset(root).frames(CAMERA, np.array([2]))


def test_video_shorter_than_its_episode(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", lengths=(5, 9), kind="video")
    videos = sorted(root.glob("videos/**/*.mp4"))
    shutil.copy(videos[0], videos[1])
    with pytest.raises(FrameError, match=r"has 5 frames, but episode 1 with 9 frames starts 0\.000 s into it"):
        open_dataset(root).frames(CAMERA, np.array([6]))


def test_a_task_without_text_is_no_prompt_named_none(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", version="v2.1")
    path = root / "meta" / "tasks.jsonl"
    path.write_text('{"task_index": 0, "task": null}\n')
    assert open_dataset(root).tasks[0] == ""


def test_one_task_number_with_two_texts(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", version="v2.1")
    path = root / "meta" / "tasks.jsonl"
    path.write_text('{"task_index": 0, "task": "lift"}\n{"task_index": 0, "task": "drop"}\n')
    assert_refused(root, "tasks.jsonl", "two texts", "lift", "drop")


def test_text_where_numbers_are_declared(tmp_path: pathlib.Path) -> None:
    root = write_dataset(tmp_path / "d", version="v2.1")
    path = data_file(root)
    edit_table(
        path,
        lambda table: table.set_column(
            table.column_names.index("observation.state"), "observation.state", pa.array(["x"] * len(table))
        ),
    )
    dataset = open_dataset(root)
    with pytest.raises(UserError, match=r"observation\.state.*holds text"):
        dataset.column("observation.state")
