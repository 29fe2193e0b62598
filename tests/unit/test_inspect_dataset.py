"""scripts/inspect_dataset.py: what it shows, what it finds, and its exit codes."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openpi_accel.errors import UserError
from openpi_accel.tools.inspect_dataset import main, parse_rows
from tests.lerobot_writer import CAMERA, numbered_frame, png, write_dataset, write_video

Report = dict


def inspect(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, Report]:
    code = main([*map(str, argv), "--json"], {"HOME": "/nowhere"})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return code, json.loads(lines[0])


def edit_images(path: pathlib.Path, images: dict[int, bytes]) -> None:
    table = pq.read_table(path)
    column = table.column(CAMERA).to_pylist()
    for row, data in images.items():
        column[row]["bytes"] = data
    pq.write_table(table.drop_columns([CAMERA]).append_column(CAMERA, pa.array(column)), path)


@pytest.mark.parametrize(
    ("version", "kind", "codec"), [("v2.0", "image", "png"), ("v2.1", "video", "h264"), ("v3.0", "video", "h264")]
)
def test_description(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], version: str, kind: str, codec: str
) -> None:
    code, report = inspect(capsys, write_dataset(tmp_path / "d", version=version, kind=kind, lengths=(5, 3, 4)))
    assert code == 0
    assert (report["version"], report["fps"], report["episodes"], report["frames"]) == (version, 10, 3, 12)
    assert (report["shortest_episode"], report["longest_episode"]) == (3, 5)
    assert report["cameras"] == {CAMERA: {"kind": kind, "height": 16, "width": 128, "codec": codec, "depth": False}}
    assert report["columns"]["action"] == {"dtype": "float32", "shape": [2]}
    assert report["mapping"]["cameras"] == {"base_0_rgb": CAMERA}
    assert (report["mapping"]["state_key"], report["mapping"]["action_dim"]) == ("observation.state", 2)
    first, second = report["tasks"]
    assert (first["task"], first["episodes"], first["frames"]) == ("stack the cups", 2, 9)
    assert (second["characters"], second["words"], "tokens" in second) == (15, 3, False)


def test_token_counts(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], repo: pathlib.Path) -> None:
    tokenizer = next((repo / "assets" / "demo").glob("*.model"))
    _, report = inspect(capsys, write_dataset(tmp_path / "d"), "--tokenizer", tokenizer)
    for task in report["tasks"]:
        assert 2 <= task["tokens"] < task["tokens_with_state"]


def test_rows(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = inspect(capsys, write_dataset(tmp_path / "d"), "--rows", "6,0", "--horizon", "3")
    row = report["rows"][0]
    assert (row["row"], row["episode"], row["frame"], row["task"]) == (6, 1, 1, "open the drawer")
    assert row["state"] == [1, 1, 6]
    assert row["action"] == [[6, -6], [7, -7], [7, -7]]
    assert row["action_is_pad"] == [False, False, True]
    assert report["rows"][1]["row"] == 0


@pytest.mark.shared
@pytest.mark.parametrize("name", ["libero_shaped_v20", "v30_converted_video"])
def test_rows_equal_lerobots_own(shared: pathlib.Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    with np.load(shared / "datasets" / "expected" / f"{name}.npz") as file:
        expected = dict(file)
    _, report = inspect(capsys, shared / "datasets" / name, "--rows", "0,5,77")
    for row in report["rows"]:
        i = row["row"]
        assert np.float32(row["state"]).tolist() == expected["state"][i].tolist()
        assert np.float32(row["action"]).tolist() == expected["action"][i].tolist()
        assert row["action_is_pad"] == expected["action_is_pad"][i].tolist()
        assert row["task"] == expected["task"][i]
        assert row["crc32"] == {key[6:]: int(v[i]) for key, v in expected.items() if key.startswith("crc32/")}


def test_parse_rows() -> None:
    assert parse_rows("0, 5,10-12") == [0, 5, 10, 11, 12]
    for text in ("", "a", "1,,2", "-3", "1.5"):
        with pytest.raises(UserError, match="--rows"):
            parse_rows(text)


@pytest.mark.parametrize(
    ("version", "kind"), [("v2.1", "image"), ("v3.0", "image"), ("v2.1", "video"), ("v3.0", "video")]
)
def test_a_sound_dataset(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], version: str, kind: str) -> None:
    root = write_dataset(tmp_path / "d", version=version, kind=kind, lengths=(70, 3))
    code, report = inspect(capsys, root, "--check")
    assert (code, report["problems"]) == (0, [])


def test_bad_images(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_dataset(tmp_path / "d", lengths=(5, 70))
    path = sorted(root.glob("data/*/*.parquet"))[1]
    edit_images(path, {3: png(numbered_frame(1))[:50], 68: png(numbered_frame(1)[:8])})
    code, report = inspect(capsys, root, "--check")
    assert code == 1
    cut, small = report["problems"]
    place = {"dataset": str(root), "episode": 1, "source": CAMERA}
    assert cut | place == cut and (cut["frame"], cut["row"]) == (3, 8) and "not a whole image" in cut["problem"]
    assert small | place == small and small["frame"] == 68 and "8 x 128" in small["problem"]


def test_frames_of_another_size_than_declared(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_dataset(tmp_path / "d")
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][CAMERA]["shape"] = [32, 128, 3]
    (root / "meta/info.json").write_text(json.dumps(info))
    code, report = inspect(capsys, root, "--check")
    assert code == 1
    assert [problem["problem"] for problem in report["problems"]] == ["is 16 x 128, info.json declares 32 x 128"]


def test_bad_video(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_dataset(tmp_path / "d", kind="video", lengths=(4, 3, 3))
    videos = sorted(root.glob("videos/**/*.mp4"))
    write_video(videos[1], range(2))
    code, report = inspect(capsys, root, "--check")
    assert code == 1
    assert [(p["episode"], p["frame"]) for p in report["problems"]] == [(1, 0), (1, 1), (1, 2)]
    assert all("has 2 frames, but episode 1 with 3" in p["problem"] for p in report["problems"])
    assert main([str(root), "--check"], {}) == 1
    assert f"bad: episode 1, frames 0 to 2, {CAMERA}:" in capsys.readouterr().out
    videos[0].unlink()
    code, report = inspect(capsys, root)
    assert code == 1 and "missing" in report["cameras"][CAMERA]["problem"]


def test_bad_numbers(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_dataset(tmp_path / "d")
    path = sorted(root.glob("data/*/*.parquet"))[1]
    table = pq.read_table(path)
    changed = {
        "action": pa.array([[0, 1], [float("nan"), 1], [0, float("inf")]], pa.list_(pa.float32())),
        "frame_index": pa.array([0, 2, 1]),
        "task_index": pa.array([1, 1, 9]),
    }
    for name, column in changed.items():
        table = table.drop_columns([name]).append_column(name, column)
    pq.write_table(table.drop_columns(["timestamp"]), path)
    code, report = inspect(capsys, root, "--check")
    assert code == 1
    found = [(p["source"], p["episode"], p["frame"]) for p in report["problems"]]
    assert found == [
        ("action", 1, 1),
        ("action", 1, 2),
        ("timestamp", None, None),
        ("frame_index", 1, 1),
        ("frame_index", 1, 2),
        ("task_index", 1, 2),
    ]
    _, report = inspect(capsys, root, "--rows", "6", "--horizon", "1")
    assert report["rows"][0]["action"] == [["nan", 1.0]]


def test_no_mapping_is_no_reason_to_stop(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_dataset(tmp_path / "d")
    text = (root / "meta/info.json").read_text().replace('"action"', '"command"')
    (root / "meta/info.json").write_text(text)
    for path in root.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.rename_columns([n if n != "action" else "command" for n in table.column_names]), path)
    code, report = inspect(capsys, root)
    assert code == 0 and report["mapping"] is None and "command" in report["mapping_problem"]
    with pytest.raises(UserError, match=" --action-key"):
        main([str(root), "--rows", "0"], {})
    _, report = inspect(capsys, root, "--rows", "0", "--action-key", "command")
    assert report["rows"][0]["action"][0] == [0, 0]


def test_tables(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_dataset(tmp_path / "d", tasks=("press [the] button", "open"))
    edit_images(sorted(root.glob("data/*/*.parquet"))[0], {2: b"no image"})
    assert main([str(root), "--check", "--rows", "7", "--horizon", "2"], {}) == 1
    text = capsys.readouterr().out
    for words in ("LeRobot v2.1, 2 episodes", "png", "press [the] button", "base_0_rgb <- " + CAMERA, "past the end"):
        assert words in text
    assert f"bad: episode 0, frame 2, {CAMERA}: these 8 bytes" in text
    assert "1 problems" in text


def test_a_dataset_by_name(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "org" / "name")
    assert main(["org/name", "--json"], {"HF_LEROBOT_HOME": str(tmp_path)}) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(tmp_path / "org" / "name")
    with pytest.raises(UserError, match="hf download org/other"):
        main(["org/other"], {"HF_LEROBOT_HOME": str(tmp_path)})


def test_the_script(tmp_path: pathlib.Path, repo: pathlib.Path) -> None:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(repo / "scripts" / "inspect_dataset.py"), *argv]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(repo)}, capture_output=True, text=True)

    done = run(str(write_dataset(tmp_path / "d")), "--check", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["problems"] == []
    (tmp_path / "empty").mkdir()
    done = run(str(tmp_path / "empty"))
    assert done.returncode == 2 and "is empty" in done.stderr and "Traceback" not in done.stderr
