"""Open-loop errors: the mathematics on small arrays, and the evaluation of policies whose answers are known."""

import copy
import dataclasses
import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from openpi_accel.build.data import build_source
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import TrainConfig
from openpi_accel.config.serialize import to_json
from openpi_accel.data.lerobot.dataset import open_dataset
from openpi_accel.data.mapping import resolve_columns
from openpi_accel.data.norm_stats import norm_stats_path, save_norm_stats
from openpi_accel.data.pipeline import BatchSource
from openpi_accel.data.synthetic import SyntheticConfig, write_dataset
from openpi_accel.errors import UserError
from openpi_accel.tools.compute_norm_stats import compute_norm_stats
from openpi_accel.tools.eval_open_loop import choose_episodes, evaluate, main, save_results, trained_on
from openpi_accel.tools.open_loop import last_action, open_loop_errors, spread_rows
from openpi_accel.tools.policy import Checkpoint, Policy, find_checkpoint

NO_ENV = Environment.from_env({"HOME": "/nonexistent"})


@dataclasses.dataclass
class KnownPolicy(Policy):
    """Answers with the recorded chunk plus `offset`."""

    source: BatchSource
    offset: np.ndarray

    def predict(self, rows: np.ndarray, *, seed: int = 0, num_steps: int = 10) -> np.ndarray:
        chunk, _ = self.source.dataset.chunk(self.source.mapping.action_key, rows, self.source.horizon)
        return chunk + self.offset

    def loss(self, rows: np.ndarray, *, seed: int = 0, draws: int = 1) -> np.ndarray:
        return np.tile([1.0, 2.0, 3.0], (len(rows), 1))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, repo: pathlib.Path) -> TrainConfig:
    folder = tmp_path_factory.mktemp("open_loop")
    write_dataset(folder / "dataset", SyntheticConfig(num_episodes=5, image_size=32))
    preset = get_preset("pi05_demo")
    data = dataclasses.replace(
        preset.data,
        path=str(folder / "dataset"),
        tokenizer_path=str(repo / "assets" / "demo" / "tokenizer.model"),
        episodes=(0, 1, 2),
    )
    config = dataclasses.replace(preset, data=data, assets_base_dir=str(folder / "assets"))
    dataset = open_dataset(folder / "dataset")
    rows = np.arange(dataset.num_frames)
    stats = compute_norm_stats(dataset, resolve_columns(data, dataset), rows, config=config)
    save_norm_stats(norm_stats_path(config.assets_base_dir, config.name, config.asset_id), stats)
    return config


@pytest.fixture(scope="module")
def source(config: TrainConfig) -> BatchSource:
    return build_source(config, Acceleration(), NO_ENV)[1]


def test_errors_count_recorded_steps_alone():
    recorded = np.zeros((2, 3, 2))
    is_pad = np.array([[False, False, False], [False, True, True]])
    policy = np.array(
        [
            [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]],
            [[5.0, 50.0], [100.0, 100.0], [100.0, 100.0]],
        ]
    )
    errors = open_loop_errors(recorded, is_pad, {"policy": policy, "mean action": np.full((2, 3, 2), 4.0)})
    np.testing.assert_allclose(errors.per_dim["policy"], [11 / 4, 110 / 4])
    np.testing.assert_allclose(errors.per_step["policy"], [[3, 30], [2, 20], [3, 30]])
    assert (errors.num_frames, errors.num_values) == (2, 4)
    assert errors.relative() == pytest.approx((11 / 16 + 110 / 16) / 2)
    np.testing.assert_allclose(errors.relative_per_step(), [33 / 8, 22 / 8, 33 / 8])


def test_a_step_that_nothing_reaches_is_no_number():
    is_pad = np.array([[False, True]])
    errors = open_loop_errors(
        np.zeros((1, 2, 1)), is_pad, {"policy": np.ones((1, 2, 1)), "mean action": np.ones((1, 2, 1))}
    )
    assert np.isnan(errors.per_step["policy"][1, 0])
    values = json.loads(json.dumps(errors.as_json(), allow_nan=False))
    assert values["mean_absolute_error"]["policy"] == {"per_dim": [1.0], "per_step_and_dim": [[1.0], [None]]}


def test_dimensions_that_never_move_do_not_count():
    policy = np.array([[[0.5, 7.0]]])
    recorded = np.array([[[1.0, 2.0]]])
    errors = open_loop_errors(
        recorded, np.array([[False]]), {"policy": policy, "mean action": np.array([[[0.0, 2.0]]])}
    )
    assert errors.relative() == 0.5


def test_last_action_is_the_one_before_and_never_another_episodes(source):
    dataset = source.dataset
    start = int(dataset.episode_starts[1])
    at_start = np.full((3, 3), 9.0)
    last = last_action(dataset, "action", np.array([0, start, start + 2]), at_start)
    np.testing.assert_array_equal(last[:2], at_start[:2])
    np.testing.assert_array_equal(last[2], dataset.column("action")[start + 1])


def test_rows_are_spread_over_all():
    np.testing.assert_array_equal(spread_rows(np.arange(100), 3), [0, 50, 99])
    np.testing.assert_array_equal(spread_rows(np.arange(4), 9), np.arange(4))
    np.testing.assert_array_equal(spread_rows(np.arange(4), None), np.arange(4))


def test_a_perfect_policy_has_no_error_and_a_shifted_one_its_shift(source):
    rows = np.arange(source.dataset.num_frames)
    perfect = evaluate(KnownPolicy(source, np.zeros(3)), rows, trained_on=None)
    np.testing.assert_array_equal(perfect.errors.per_dim["policy"], 0)
    assert perfect.errors.relative() == 0 and perfect.held_out is None
    shifted = evaluate(KnownPolicy(source, np.array([0.5, 0.0, -2.0])), rows, trained_on=None)
    np.testing.assert_allclose(shifted.errors.per_dim["policy"], [0.5, 0.0, 2.0], atol=1e-6)
    np.testing.assert_allclose(shifted.errors.per_step["policy"][3], [0.5, 0.0, 2.0], atol=1e-6)
    np.testing.assert_allclose(shifted.loss, [1, 2, 3])
    assert shifted.dim_names == ("vx", "vy", "gripper")


def test_baselines_are_computed_from_the_data(source):
    """At horizon step 0 of frames within an episode, both baselines by hand."""
    dataset, rows = source.dataset, np.array([1, 2, 3])
    action = dataset.column("action").astype(np.float64)
    errors = evaluate(KnownPolicy(source, np.zeros(3)), rows, trained_on=None).errors
    mean = source.numbers.norm_stats.actions.mean
    np.testing.assert_allclose(errors.per_step["mean action"][0], np.abs(action[rows] - mean).mean(0), rtol=1e-6)
    np.testing.assert_allclose(
        errors.per_step["last action"][0], np.abs(action[rows] - action[rows - 1]).mean(0), atol=1e-7
    )


def test_held_out_episodes_are_chosen_and_named(source):
    dataset = source.dataset
    assert choose_episodes(dataset, (0, 1, 2), None) == [3, 4]
    assert choose_episodes(dataset, None, None) == [0, 1, 2, 3, 4]
    assert choose_episodes(dataset, range(5), None) == [0, 1, 2, 3, 4]
    assert choose_episodes(dataset, (0,), [0]) == [0]
    policy, starts = KnownPolicy(source, np.zeros(3)), dataset.episode_starts
    assert evaluate(policy, starts[3:5], trained_on=(0, 1, 2)).held_out is True
    assert evaluate(policy, starts[2:4], trained_on=(0, 1, 2)).held_out is False


def test_what_was_trained_on_is_known_by_place_or_content(source, config, tmp_path):
    def trained(**changes: object) -> tuple[int, ...] | None:
        data = dataclasses.replace(config.data, **changes)
        return trained_on(Checkpoint(folder=tmp_path, config=dataclasses.replace(config, data=data)), source)

    assert trained() == (0, 1, 2)
    assert trained(episodes=None) == (0, 1, 2, 3, 4)
    assert len(trained(episodes=None, val_fraction=0.4) or ()) == 3
    assert trained(path=str(tmp_path)) == (0, 1, 2)  # moved since, equal in content
    stats = dataclasses.replace(source.numbers.norm_stats, computed_for=None)
    other = copy.copy(source)
    other.numbers = dataclasses.replace(source.numbers, norm_stats=stats)
    data = dataclasses.replace(config.data, path=str(tmp_path))
    elsewhere = Checkpoint(folder=tmp_path, config=dataclasses.replace(config, data=data))
    assert trained_on(elsewhere, other) is None
    assert trained_on(Checkpoint(folder=tmp_path, config=None), source) is None


def test_results_are_saved(source, tmp_path):
    policy = KnownPolicy(source, np.zeros(3))
    evaluation = evaluate(policy, source.dataset.episode_starts[:-1], trained_on=(0, 1, 2))
    pictures = save_results(policy, evaluation, tmp_path / "out", num_steps=2, seed=0)
    longest = sorted(np.argsort(-np.diff(source.dataset.episode_starts), kind="stable")[:3])
    assert [path.name for path in pictures] == [f"episode_{number}.png" for number in longest]
    width, height = Image.open(pictures[0]).size
    assert width > 800 and height > 200
    assert json.loads((tmp_path / "out" / "errors.json").read_text())["held_out"] is False


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path)
    (tmp_path / "12" / "params").mkdir(parents=True)
    with pytest.raises(UserError, match="--config=NAME"):
        main([str(tmp_path)], {"HOME": "/nonexistent"})
    with pytest.raises(UserError, match="--num-samples is 0"):
        main([str(tmp_path), "--num-samples", "0"], {"HOME": "/nonexistent"})


def test_statistics_come_from_the_checkpoint(tmp_path, config):
    step = tmp_path / "12"
    (step / "params").mkdir(parents=True)
    (tmp_path / "config.json").write_text(to_json(config))
    checkpoint = find_checkpoint(tmp_path)
    assert checkpoint.folder == step and checkpoint.config == config
    with pytest.raises(UserError, match="asset ids in this checkpoint: none"):
        checkpoint.norm_stats_file("a/b")
    for asset in ("x/y", "a/b"):
        (step / "assets" / asset).mkdir(parents=True)
        (step / "assets" / asset / "norm_stats.json").write_text("{}")
    assert checkpoint.norm_stats_file("a/b") == step / "assets" / "a" / "b" / "norm_stats.json"
    with pytest.raises(UserError, match="a/b, x/y"):
        checkpoint.norm_stats_file("c")
