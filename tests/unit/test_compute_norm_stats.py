"""scripts/compute_norm_stats.py: only numbers are read, and bad ones are named."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openpi_accel.config.presets import get_preset
from openpi_accel.data.lerobot.dataset import open_dataset
from openpi_accel.data.mapping import resolve_columns
from openpi_accel.data.norm_stats import load_norm_stats
from openpi_accel.data.rows import rows_of_episodes
from openpi_accel.data.stats_command import stats_command
from openpi_accel.errors import UserError
from openpi_accel.tools.compute_norm_stats import choose_frames, compute_norm_stats, main, parse_args

LENGTHS = (7, 3, 12)


@pytest.fixture
def dataset(tmp_path):
    """A v2.1 dataset whose cameras were never there."""
    root, rng = tmp_path / "dataset", np.random.default_rng(0)
    (root / "meta").mkdir(parents=True)
    (root / "data" / "chunk-000").mkdir(parents=True)
    columns = {"observation.state": 3, "action": 2}
    features = {key: {"dtype": "float32", "shape": [dim], "names": None} for key, dim in columns.items()}
    features |= {key: {"dtype": "int64", "shape": [1], "names": None} for key in ("task_index", "episode_index")}
    features["observation.images.base"] = {
        "dtype": "video",
        "shape": [64, 64, 3],
        "names": ["height", "width", "channel"],
    }
    info = {
        "codebase_version": "v2.1", "fps": 10, "features": features, "chunks_size": 1000,
        "total_episodes": len(LENGTHS), "total_frames": sum(LENGTHS),
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }  # fmt: skip
    (root / "meta" / "info.json").write_text(json.dumps(info))
    (root / "meta" / "tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "lift"}) + "\n")
    episodes = [json.dumps({"episode_index": i, "tasks": ["lift"], "length": n}) for i, n in enumerate(LENGTHS)]
    (root / "meta" / "episodes.jsonl").write_text("\n".join(episodes) + "\n")
    for i, n in enumerate(LENGTHS):
        table = {key: list(rng.normal(size=(n, dim)).astype(np.float32)) for key, dim in columns.items()}
        table |= {"task_index": np.zeros(n, np.int64), "episode_index": np.full(n, i)}
        pq.write_table(pa.table(table), root / "data" / "chunk-000" / f"episode_{i:06d}.parquet")
    return root


def spoil(root, episode, frame, column, value):
    path = root / "data" / "chunk-000" / f"episode_{episode:06d}.parquet"
    table = pq.read_table(path).to_pydict()
    table[column] = [np.array(v, np.float32) for v in table[column]]
    table[column][frame][0] = value
    pq.write_table(pa.table(table), path)


def by_hand(root, horizon, delta_dims, rows=None):
    data = open_dataset(root)
    rows = np.arange(data.num_frames) if rows is None else rows
    state = data.column("observation.state")[rows]
    chunks = data.chunk("action", rows, horizon)[0].copy()
    chunks[..., :delta_dims] -= state[:, None, :delta_dims]
    return state.astype(np.float64), chunks.reshape(-1, chunks.shape[-1]).astype(np.float64)


def run(root, tmp_path, *options):
    argv = [
        "--config-name=pi05_lerobot",
        f"--assets-base-dir={tmp_path / 'assets'}",
        "--model.action-horizon=5",
        *options,
    ]
    assert main(argv, {"DATA_PATH": str(root), "HOME": str(tmp_path)}) == 0
    return load_norm_stats(
        tmp_path / "assets" / "pi05_lerobot" / "local" / "dataset" / "norm_stats.json", command="mend"
    )


@pytest.mark.parametrize("delta_dims", [0, 2])
def test_the_file_holds_exact_statistics_and_what_they_are_for(dataset, tmp_path, capsys, delta_dims):
    stats = run(dataset, tmp_path, f"--data.delta-action-dims={delta_dims}", "--num-workers=3")
    for ours, values in zip((stats.state, stats.actions), by_hand(dataset, 5, delta_dims), strict=True):
        np.testing.assert_allclose(ours.mean, values.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(ours.std, values.std(axis=0), rtol=1e-12)
        np.testing.assert_array_equal(ours.q01, np.quantile(values, 0.01, axis=0))
        np.testing.assert_array_equal(ours.q99, np.quantile(values, 0.99, axis=0))
    record = stats.computed_for
    assert (record.num_frames, record.action_horizon, record.delta_action_dims) == (22, 5, delta_dims)
    assert (record.state_key, record.action_key, record.dataset) == ("observation.state", "action", "local/dataset")
    out = capsys.readouterr().out
    assert "100 % of columns" in out and "22 of 22 frames" in out and "norm_stats.json written in" in out


def test_chosen_episodes_and_frames(dataset, tmp_path):
    stats = run(dataset, tmp_path, "--data.episodes", "2", "0")
    state, actions = by_hand(dataset, 5, 0, np.r_[0:7, 10:22])
    np.testing.assert_allclose(stats.state.mean, state.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(stats.actions.std, actions.std(axis=0), rtol=1e-12)
    stats = run(dataset, tmp_path, "--max-frames=9")
    rows = choose_frames(np.arange(22), 9)
    assert len(set(rows.tolist())) == 9 and (np.diff(rows) > 0).all()
    state, actions = by_hand(dataset, 5, 0, rows)
    np.testing.assert_allclose(stats.state.mean, state.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(stats.actions.std, actions.std(axis=0), rtol=1e-12)
    assert choose_frames(np.arange(5), 9).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("column", "value"), [("observation.state", np.nan), ("action", np.inf), ("action", np.nan)])
def test_bad_numbers_are_refused_by_frame_and_the_old_file_stays(dataset, tmp_path, column, value):
    run(dataset, tmp_path)
    file = tmp_path / "assets" / "pi05_lerobot" / "local" / "dataset" / "norm_stats.json"
    before = file.read_text()
    spoil(dataset, 2, 4, column, value)
    with pytest.raises(UserError, match=f"column '{column}' holds NaN or infinity in 1 frames: episode 2 frame 4"):
        run(dataset, tmp_path)
    assert file.read_text() == before
    run(dataset, tmp_path, "--data.episodes", "0", "1")  # what the message advises


def test_a_narrow_dimension_is_warned_of_and_a_floor_mends_it(dataset, tmp_path, capsys):
    for episode, n in enumerate(LENGTHS):
        for frame in range(n):
            spoil(dataset, episode, frame, "observation.state", 0.001 * (-1) ** frame)
    run(dataset, tmp_path)
    assert "warning: state dimension 0 is nearly constant" in capsys.readouterr().out
    stats = run(dataset, tmp_path, "--min-state-range=0.05")
    assert "warning" not in capsys.readouterr().out
    assert stats.state.q99[0] - stats.state.q01[0] == pytest.approx(0.05) and stats.computed_for.min_state_range == 0.05


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config-name is missing"),
        (["--config-name", "pi05_liber"], "Did you mean pi05_libero"),
        (["pi05_liber"], "Did you mean pi05_libero"),
        (["--config-name=pi05_libero", "--max-frames=0"], "--max-frames is 0"),
        (["--config-name=pi05_libero", "--min-action-range=-1"], "--min-action-range is -1"),
        (["--config-name=pi05_libero", "--name=mine"], "--name is fixed"),
    ],
)
def test_mistakes_on_the_command_line(argv, message):
    with pytest.raises(UserError, match=message):
        parse_args(argv)


def test_the_configs_own_options_are_taken(tmp_path):
    options = ["--data.path=x", "--model.action-horizon=3", "--num-workers=8"]
    args = parse_args(["--config-name=pi0_libero", *options])
    assert parse_args(["pi0_libero", *options]) == args  # as the other scripts take it
    config = get_preset("pi0_libero")
    assert args.config.data == dataclasses.replace(config.data, path="x")
    assert (args.config.model.action_horizon, args.config.num_workers, args.config.seed) == (3, 8, config.seed)


def test_the_command_in_messages_gives_the_runs_own_settings():
    assert stats_command(get_preset("pi05_libero"), "/a b") == (
        "python scripts/compute_norm_stats.py --config-name=pi05_libero '--data.path=/a b'"
    )
    preset = get_preset("pi05_lerobot")
    config = dataclasses.replace(
        preset,
        model=dataclasses.replace(preset.model, action_horizon=7),
        data=dataclasses.replace(preset.data, delta_action_dims=2, state_key="s", episodes=(1, 3), repo_id="a/b"),
    )
    command = stats_command(config)
    assert "--data.path=DATASET_FOLDER" in command
    again = parse_args(command.split()[2:]).config
    assert again == dataclasses.replace(config, data=dataclasses.replace(config.data, path="DATASET_FOLDER"))


def test_more_delta_dimensions_than_there_are(dataset, tmp_path):
    with pytest.raises(UserError, match=r"--data.delta-action-dims=3 is more than"):
        run(dataset, tmp_path, "--data.delta-action-dims=3")


def test_the_script_exits_with_2_and_one_message(repo, tmp_path):
    result = subprocess.run(
        [sys.executable, str(repo / "scripts" / "compute_norm_stats.py"), "--config-name=pi05_libero"],
        env={**os.environ, "PYTHONPATH": str(repo), "HOME": str(tmp_path), "DATA_PATH": str(tmp_path / "nowhere")},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "error: There is no folder" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.shared
def test_libero_without_its_images_gives_the_same(shared, tmp_path):
    source = shared / "datasets" / "libero_shaped_v20"
    config = get_preset("pi05_libero")
    copy = tmp_path / "copy"
    shutil.copytree(source / "meta", copy / "meta")
    for path in sorted(source.rglob("*.parquet")):
        target = copy / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        table = pq.read_table(path)
        pq.write_table(table.drop_columns(["image", "wrist_image"]), target)
    results = []
    for root in (source, copy):
        data = open_dataset(root)
        rows = rows_of_episodes(data, None)
        results.append(compute_norm_stats(data, resolve_columns(config.data, data), rows, config=config))
    assert results[0].computed_for == results[1].computed_for
    expected = np.load(shared / "datasets" / "expected" / "libero_shaped_v20.npz")
    actions = expected["action"].reshape(-1, 7).astype(np.float64)
    for stats in results:
        np.testing.assert_array_equal(stats.actions.q99, np.quantile(actions, 0.99, axis=0))
        np.testing.assert_allclose(stats.actions.mean, actions.mean(axis=0), atol=1e-14)
        np.testing.assert_allclose(stats.state.std, expected["state"].astype(np.float64).std(axis=0), rtol=1e-12)
