"""The drawn dataset: real LeRobot files, equal for equal seeds, whose action needs pictures and prompt."""

import dataclasses
import json
import pathlib

import numpy as np
import pyarrow.parquet as pq
import pytest

from openpi_accel.config.presets import get_preset
from openpi_accel.data import synthetic
from openpi_accel.data.lerobot.dataset import open_dataset
from openpi_accel.data.mapping import resolve_columns
from openpi_accel.data.norm_stats import load_norm_stats, norm_stats_path
from openpi_accel.data.rows import rows_of_episodes
from openpi_accel.data.synthetic import CAMERAS, SyntheticConfig, write_dataset
from openpi_accel.data.synthetic_scene import COLOURS, TASKS, make_episode
from openpi_accel.errors import UserError
from openpi_accel.tools.compute_norm_stats import compute_norm_stats
from openpi_accel.tools.demo import training_episodes
from openpi_accel.tools.inspect_dataset import main as inspect_main

SMALL = SyntheticConfig(num_episodes=7, image_size=32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("drawn") / "dataset"
    write_dataset(root, SMALL)
    return root


def contents(root: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def make(task: int, *seed: int):
    return make_episode(np.random.default_rng(seed), task=task, image_size=32)


def test_our_reader_gives_back_what_was_drawn(root):
    dataset = open_dataset(root)
    assert (dataset.version, dataset.num_episodes, set(dataset.cameras)) == ("v3.0", SMALL.num_episodes, set(CAMERAS))
    for number in range(SMALL.num_episodes):
        episode = make(number % len(TASKS), SMALL.seed, number)
        rows = np.arange(dataset.episode_starts[number], dataset.episode_starts[number + 1])
        np.testing.assert_array_equal(dataset.column("observation.state")[rows], episode.state)
        np.testing.assert_array_equal(dataset.column("action")[rows], episode.action)
        assert dataset.task_of(rows) == [TASKS[number % len(TASKS)]] * len(rows)
        for camera, images in zip(CAMERAS, (episode.base, episode.wrist), strict=True):
            np.testing.assert_array_equal(dataset.frames(camera, rows), images)


def test_inspection_finds_no_fault(root, capsys):
    assert inspect_main([str(root), "--check", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out)["version"] == "v3.0"


def test_episodes_span_files(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "_EPISODES_PER_FILE", 3)
    write_dataset(tmp_path / "files", SMALL)
    assert len(list((tmp_path / "files" / "data").rglob("*.parquet"))) == 3
    dataset = open_dataset(tmp_path / "files")
    number = SMALL.num_episodes - 1
    last = make(number % len(TASKS), SMALL.seed, number)
    np.testing.assert_array_equal(dataset.frames(CAMERAS[1], np.array([dataset.num_frames - 1]))[0], last.wrist[-1])


def test_equal_seeds_give_equal_bytes(root, tmp_path):
    write_dataset(tmp_path / "again", SMALL)
    assert contents(tmp_path / "again") == contents(root)
    write_dataset(tmp_path / "other", SyntheticConfig(num_episodes=7, image_size=32, seed=1))
    assert contents(tmp_path / "other") != contents(root)


@pytest.mark.shared
def test_files_have_lerobots_own_layout(root, shared):
    theirs = shared / "datasets" / "v30_image"
    for path in ("data/chunk-000/file-000.parquet", "meta/tasks.parquet"):
        assert set(pq.read_schema(root / path).names) == set(pq.read_schema(theirs / path).names)
        assert set(pq.read_schema(root / path).metadata) == set(pq.read_schema(theirs / path).metadata)
    path = "meta/episodes/chunk-000/file-000.parquet"
    ours, wanted = pq.read_schema(root / path), pq.read_schema(theirs / path)
    assert {field.name: field.type for field in ours} == {field.name: field.type for field in wanted}
    for name in ("info.json", "stats.json"):
        assert set(json.loads((root / "meta" / name).read_text())) == set(
            json.loads((theirs / "meta" / name).read_text())
        )


def test_statistics_are_those_of_the_data(root):
    stats = json.loads((root / "meta" / "stats.json").read_text())
    for name in ("observation.state", "action"):
        column = open_dataset(root).column(name).astype(np.float64)
        for key, value in {
            "mean": column.mean(0),
            "std": column.std(0),
            "min": column.min(0),
            "max": column.max(0),
        }.items():
            np.testing.assert_allclose(stats[name][key], value, rtol=1e-9, atol=1e-12, err_msg=f"{name} {key}")
        assert stats[name]["count"] == [len(column)]


def test_the_prompt_decides():
    """Same scene, same state, same pictures: another prompt, another action."""
    first = [make(task, 5) for task in range(len(TASKS))]
    for other in first[1:]:
        for name in ("base", "wrist", "state"):
            np.testing.assert_array_equal(getattr(other, name)[0], getattr(first[0], name)[0])
        assert np.abs(other.action[0, :2] - first[0].action[0, :2]).max() > 0.02


def test_the_pictures_decide():
    """Same prompt, same state: the velocity of the first frame points anywhere, and nothing but pictures says where."""
    episodes = [make(0, 3, number) for number in range(200)]
    state = np.array([episode.state[0] for episode in episodes], np.float64)
    velocity = np.array([episode.action[0, :2] for episode in episodes], np.float64)
    assert velocity.std(0).min() > 0.05
    for axis in range(2):
        for finger in range(2):
            assert abs(np.corrcoef(state[:, finger], velocity[:, axis])[0, 1]) < 0.25


def test_the_gripper_reaches_the_named_tray():
    for task, colour in enumerate(COLOURS.values()):
        episode = make(task, 11)
        assert episode.action[-1, 2] == 1 and episode.action[0, 2] == 0
        centre = episode.wrist[-1][12:20, 12:20].reshape(-1, 3).astype(int)
        assert np.abs(centre - np.array(colour)).sum(axis=1).min() < 30


def test_shuffling_moves_pictures_and_prompts_alone(root, tmp_path):
    write_dataset(tmp_path / "shuffled", SyntheticConfig(num_episodes=7, image_size=32, shuffled=True))
    ours, theirs = open_dataset(root), open_dataset(tmp_path / "shuffled")
    rows = np.arange(ours.num_frames)
    for name in ("observation.state", "action", "episode_index"):
        np.testing.assert_array_equal(theirs.column(name), ours.column(name))
    before = [image.tobytes() for image in ours.frames(CAMERAS[1], rows)]
    after = [image.tobytes() for image in theirs.frames(CAMERAS[1], rows)]
    assert sorted(after) == sorted(before)
    assert np.mean([a == b for a, b in zip(after, before, strict=True)]) < 0.2
    # A picture keeps its prompt and its other camera.
    seen = dict(
        zip(before, zip(ours.task_of(rows), map(bytes, ours.frames(CAMERAS[0], rows)), strict=True), strict=True)
    )
    assert [seen[image] for image in after] == list(
        zip(theirs.task_of(rows), map(bytes, theirs.frames(CAMERAS[0], rows)), strict=True)
    )


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match="exists already"):
        write_dataset(tmp_path / "data", SMALL)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(synthetic, "_tasks_table", fail)
    with pytest.raises(OSError, match="no space left"):
        write_dataset(tmp_path / "data", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_statistics_are_the_demos(tmp_path, repo):
    """Numbers do not depend on the size of the pictures."""
    write_dataset(tmp_path / "data", dataclasses.replace(SyntheticConfig(), image_size=8))
    dataset, config = open_dataset(tmp_path / "data"), get_preset("pi05_demo")
    rows = rows_of_episodes(dataset, training_episodes(dataset))
    computed = compute_norm_stats(dataset, resolve_columns(config.data, dataset), rows, config=config)
    shipped = load_norm_stats(norm_stats_path(repo / "assets", config.name, config.asset_id), command="")
    assert shipped.computed_for == computed.computed_for
    for key in ("state", "actions"):
        for name in ("mean", "std", "q01", "q99"):
            np.testing.assert_allclose(getattr(getattr(shipped, key), name), getattr(getattr(computed, key), name))
