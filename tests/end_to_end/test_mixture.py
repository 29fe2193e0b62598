"""Three datasets with other columns, sizes and cameras in one run: trains, resumes, holds out, is tried per part."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from openpi_accel.build.mixture import build_mixture
from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.data.norm_stats import norm_stats_path
from openpi_accel.data.synthetic import SyntheticConfig, write_dataset
from openpi_accel.errors import UserError
from openpi_accel.tools import compute_norm_stats, eval_open_loop
from openpi_accel.tools.demo import TOKENIZER
from openpi_accel.train.metrics import read_rows
from openpi_accel.training_run import train
from tests.conftest import NUM_CPU_DEVICES, SHARED

pytestmark = pytest.mark.shared
NO_ENV = Environment.from_env({})
TWO, ONE = ("base_0_rgb", "left_wrist_0_rgb"), ("base_0_rgb",)
BATCH = 8


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """The options of a run, with the statistics of every part computed by the tool."""
    tmp_path = tmp_path_factory.mktemp("mixture")
    write_dataset(tmp_path / "drawn", SyntheticConfig(num_episodes=3))
    parts = [
        {"path": str(SHARED / "datasets/robosuite_lift_v30"), "weight": 2, "name": "lift"},
        {"path": str(SHARED / "datasets/libero_shaped_v20"), "weight": 1, "name": "libero", "delta_action_dims": 6},
        {"path": "drawn", "weight": 1, "cameras": {"base_0_rgb": "observation.images.base"}},
    ]
    (tmp_path / "mixture.json").write_text(json.dumps({"parts": parts}))
    options = [f"--data.mixture={tmp_path / 'mixture.json'}", f"--assets-base-dir={tmp_path / 'assets'}"]
    assert compute_norm_stats.main(["--config-name=pi05_demo", *options], {}) == 0
    return [
        "pi05_demo", *options, f"--data.tokenizer-path={TOKENIZER}", f"--batch-size={BATCH}",
        "--log-interval=1", "--num-workers=2", f"--checkpoint-base-dir={tmp_path / 'checkpoints'}",
    ]  # fmt: skip


def config_of(arguments, *further):
    return parse_train_config([*arguments, *further], prog="t", description="t")


def built(arguments, *further):
    return build_mixture(config_of(arguments, *further), Acceleration(skip_images=("auto",)), NO_ENV)


def test_every_sample_is_its_own_datasets(arguments):
    """Whichever parts a batch holds, each sample is what its part alone would have made of that row."""
    data = built(arguments)
    assert [part.source.slots for part in data.datasets] == [TWO, TWO, ONE]
    with data.loader() as loader:
        batches = [next(loader) for _ in range(8)]
    seen = set()
    for loaded in batches:
        pairs = data.rows_of(loaded.sample_ids)
        of_batch = {int(part) for part, _ in pairs}
        assert of_batch <= {0, 1} or of_batch == {2}
        assert tuple(loaded.batch.observation.images) == (ONE if of_batch == {2} else TWO)
        seen.add(frozenset(of_batch))
        for i, (part, row) in enumerate(pairs.tolist()):
            alone = data.datasets[part].source.load_batch(np.array([row]))
            for one, other in zip(jax.tree.leaves(loaded.batch), jax.tree.leaves(alone), strict=True):
                np.testing.assert_array_equal(one[i], other[0])
    assert seen == {frozenset({0, 1}), frozenset({2})}
    assert data.shares()[0].startswith("lift: 50 % of the samples; its 1384 frames are seen")
    assert "lift: " in data.describe(batches[0].sample_ids) + data.describe(batches[1].sample_ids)


def test_worker_processes_make_the_same_batches(arguments):
    config = config_of(arguments)
    processes = build_mixture(config, Acceleration(skip_images=("auto",), worker_cpu=True), NO_ENV)
    with built(arguments).loader() as threads, processes.loader() as others:
        for _ in range(4):
            one, other = next(threads), next(others)
            np.testing.assert_array_equal(one.sample_ids, other.sample_ids)
            jax.tree.map(np.testing.assert_array_equal, one.batch, other.batch)


def test_trains_and_goes_on_as_if_it_had_not_stopped(arguments, capsys, quick):
    assert jax.device_count() == NUM_CPU_DEVICES
    acceleration = Acceleration(skip_images=("auto",), skip_video_decode=True)

    def losses(name, *further):
        config = config_of(arguments, f"--exp-name={name}", *further)
        assert train(config, acceleration, NO_ENV).exit_code == 0
        rows = read_rows(pathlib.Path(config.checkpoint_base_dir) / "pi05_demo" / name / "metrics.jsonl")
        return {row["step"]: (row["loss"], row["sample_ids_hash"]) for row in rows if "loss" in row}

    held_out = ("--data.val-fraction=0.34", "--val-batches=1", "--save-interval=3", "--keep-period=3")
    straight = losses("straight", "--num-train-steps=6", *held_out)
    said = capsys.readouterr().out
    assert said.count("step compiled in") == 2 and f"(batches with {', '.join(TWO)})" in said
    assert "libero: 25 % of the samples" in said
    assert sorted(straight) == list(range(6)) and all(np.isfinite(loss) for loss, _ in straight.values())
    runs = pathlib.Path(config_of(arguments).checkpoint_base_dir) / "pi05_demo"
    shutil.copytree(runs / "straight", runs / "stopped")
    shutil.rmtree(runs / "stopped" / "5")
    assert (runs / "stopped" / "3").is_dir()
    assert losses("stopped", "--num-train-steps=6", "--resume", *held_out) == straight
    folder = runs / "stopped"
    rows = read_rows(folder / "metrics.jsonl")
    assert any("val_loss" in row for row in rows)

    with pytest.raises(UserError, match=r"mixture.batch_size: saved 8, now 16"):
        losses("stopped", "--num-train-steps=9", "--resume", "--batch-size=16", *held_out)
    with pytest.raises(UserError, match="name one of its parts with --part: lift, libero, drawn"):
        eval_open_loop.main([str(folder)], {})
    capsys.readouterr()
    assert eval_open_loop.main([str(folder), "--part=libero", "--num-samples=4", "--num-steps=2", "--json"], {}) == 0
    result = json.loads(capsys.readouterr().out)
    assert "libero_shaped_v20" in result["data"] and result["held_out"] is True


def test_what_a_part_lacks_is_told_with_its_name(arguments, tmp_path):
    content = json.loads(pathlib.Path(arguments[1].partition("=")[2]).read_text())
    for change, message in (
        ({"state_key": "pose"}, "part libero: .*no numeric column 'pose'"),
        ({"asset_id": "me/none"}, "(?s)part libero: There are no normalisation statistics .*asset-id=me/none"),
        ({"val_fraction": 0.9}, "part libero: .*none is left to train"),
    ):
        parts = [content["parts"][0], content["parts"][1] | change]
        (tmp_path / "changed.json").write_text(json.dumps({"parts": parts}))
        with pytest.raises(UserError, match=message):
            built(arguments, f"--data.mixture={tmp_path / 'changed.json'}")


def test_two_folders_of_one_name_do_not_share_statistics(arguments, tmp_path):
    write_dataset(tmp_path / "drawn", SyntheticConfig(num_episodes=2))
    content = json.loads(pathlib.Path(arguments[1].partition("=")[2]).read_text())
    first = content["parts"][2] | {"path": str(tmp_path / "drawn"), "name": "first"}
    second = first | {"path": arguments[1].partition("=")[2].replace("mixture.json", "drawn"), "name": "second"}
    (tmp_path / "twins.json").write_text(json.dumps({"parts": [first, second]}))
    twins = f"--data.mixture={tmp_path / 'twins.json'}"
    with pytest.raises(UserError, match="Part second would use the statistics local/drawn"):
        built(arguments, twins)
    config = config_of(arguments)
    assert norm_stats_path(config.assets_base_dir, config.name, "local/drawn").is_file()
