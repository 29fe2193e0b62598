"""Presets, the command line, the switches and the run folder's config file."""

import dataclasses

import pytest

from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.presets import PRESETS, get_preset
from openpi_accel.config.schema import ModelConfig, ScheduleConfig
from openpi_accel.config.serialize import from_json, to_json
from openpi_accel.errors import UserError


def _parse(*argv):
    return parse_train_config(argv, prog="train.py", description="trains")


def test_libero_presets_hold_upstreams_values():
    pi05, pi0 = PRESETS["pi05_libero"], PRESETS["pi0_libero"]
    assert (pi05.model.action_horizon, pi05.batch_size, pi05.num_train_steps, pi05.seed) == (10, 256, 30000, 42)
    assert pi05.lr_schedule == ScheduleConfig(warmup_steps=10000, peak_lr=5e-5, decay_steps=1000000, decay_lr=5e-5)
    assert (pi05.ema_decay, pi05.save_interval, pi05.keep_period, pi05.log_interval) == (0.999, 1000, 5000, 100)
    assert (pi05.model.max_token_len, pi05.num_workers, pi05.fsdp_devices) == (200, 2, 1)
    assert not pi05.model.discrete_state_input and pi05.data.normalization == "quantile"
    assert (pi0.model.action_horizon, pi0.batch_size, pi0.ema_decay, pi0.model.max_token_len) == (50, 32, 0.99, 48)
    assert pi0.lr_schedule == ScheduleConfig(warmup_steps=1000, peak_lr=2.5e-5, decay_steps=30000, decay_lr=2.5e-6)
    assert not pi0.model.pi05 and pi0.data.delta_action_dims == 6 and pi0.data.normalization == "zscore"


def test_upstreams_options_are_taken():
    config = _parse(
        "pi05_libero", "--exp-name=a", "--batch-size", "64", "--num-workers", "8", "--fsdp-devices=4",
        "--num-train-steps=7", "--save-interval=3", "--keep-period=6", "--log-interval=2", "--checkpoint-base-dir=c",
        "--assets-base-dir=d", "--model.max-token-len", "28", "--weight-loader.params-path", "p", "--resume",
        "--allow-truncation",
    )  # fmt: skip
    assert (config.exp_name, config.batch_size, config.num_workers, config.fsdp_devices) == ("a", 64, 8, 4)
    assert (config.num_train_steps, config.save_interval, config.keep_period, config.log_interval) == (7, 3, 6, 2)
    assert (config.checkpoint_base_dir, config.assets_base_dir, config.model.max_token_len) == ("c", "d", 28)
    assert config.weight_loader.params_path == "p" and config.resume and config.data.allow_truncation


def test_a_typo_in_the_config_name_is_answered_with_the_nearest_one():
    with pytest.raises(UserError, match="Did you mean pi05_libero"):
        get_preset("pi05_lbero")
    with pytest.raises(UserError, match="config name comes first"):
        _parse("--exp-name=a", "pi05_libero")


def test_an_unknown_option_exits_with_2_and_a_suggestion(capsys):
    with pytest.raises(SystemExit) as caught:
        _parse("pi05_libero", "--max-tokn-len", "28")
    assert caught.value.code == 2
    assert "--model.max-token-len" in capsys.readouterr().err


def test_contradictions_are_refused_with_what_to_do():
    with pytest.raises(UserError, match="exclude each other"):
        dataclasses.replace(PRESETS["pi05_libero"], resume=True, overwrite=True)
    with pytest.raises(UserError, match="share attention"):
        ModelConfig(paligemma_variant="gemma_2b", action_expert_variant="tiny_expert")
    with pytest.raises(UserError, match="batch-size"):
        dataclasses.replace(PRESETS["pi05_libero"], batch_size=0)


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_its_file(name):
    config = dataclasses.replace(PRESETS[name], exp_name="x")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, episodes=(1, 2)))
    assert from_json(to_json(config), "config.json") == config
    with pytest.raises(UserError, match="config.json"):
        from_json("[1]", "config.json")


def test_switches_are_strict_and_off_by_default():
    assert Acceleration.from_env({}) == Acceleration()
    assert not any(dataclasses.astuple(dataclasses.replace(Acceleration(), flash_impl="")))
    assert Acceleration.from_env({"OPENPI_SKIP_VIDEO_DECODE": "true"}).skip_video_decode
    base = Acceleration(skip_video_decode=True)
    assert not Acceleration.from_env({"OPENPI_SKIP_VIDEO_DECODE": "0"}, base).skip_video_decode
    assert Acceleration.from_env({"OPENPI_SKIP_IMAGES": "right_wrist_0_rgb"}).skip_images == ("right_wrist_0_rgb",)
    with pytest.raises(UserError, match="neither on nor off"):
        Acceleration.from_env({"OPENPI_SKIP_VIDEO_DECODE": "yes"})
    with pytest.raises(UserError, match="Did you mean OPENPI_SKIP_IMAGES"):
        Acceleration.from_env({"OPENPI_SKIP_IMAGE": "1"})
    with pytest.raises(UserError, match="Did you mean right_wrist_0_rgb"):
        Acceleration.from_env({"OPENPI_SKIP_IMAGES": "right_wrist_rgb"})
    with pytest.raises(UserError, match="every camera"):
        Acceleration.from_env({"OPENPI_SKIP_IMAGES": "base_0_rgb,left_wrist_0_rgb,right_wrist_0_rgb"})
    assert Acceleration.from_env({"OPENPI_FLASH_ATTN": "1", "OPENPI_FLASH_IMPL": "cudnn"}).flash_impl == "cudnn"
    with pytest.raises(UserError, match="OPENPI_FLASH_IMPL"):
        Acceleration.from_env({"OPENPI_FLASH_IMPL": "triton"})
    assert (
        Acceleration.from_env({"OPENPI_DATA_HOME": "/x", "OPENPI_CACHE_HOME": "/y", "OPENPI_PYTHON": "python3"})
        == Acceleration()
    )


def test_folders_follow_the_variables_of_the_libraries():
    env = Environment.from_env({"HOME": "/h", "HF_HOME": "/hf", "OPENPI_DATA_HOME": "/o", "OPENPI_CACHE_HOME": "/c"})
    assert [str(folder) for folder in dataclasses.astuple(env)] == ["/o", "/hf/lerobot", "/hf/hub", "/c"]
    assert str(Environment.from_env({"HOME": "/h"}).openpi_cache_home) == "/h/.cache/openpi_accel"
    assert str(Environment.from_env({"HOME": "/h"}).openpi_data_home) == "/h/.cache/openpi"
