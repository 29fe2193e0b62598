"""Options of a resumed run: its config.json's, with what the user gives over them."""

import dataclasses
import os
import pathlib
import shlex

import pytest

from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.presets import get_preset
from openpi_accel.config.resumed import changed_options, resume_command, with_absolute_paths
from openpi_accel.config.schema import TrainConfig
from openpi_accel.config.serialize import to_json
from openpi_accel.errors import UserError


def parse(*words: str) -> TrainConfig:
    return parse_train_config(["pi05_lerobot", *words], prog="train", description="")


@pytest.fixture
def runs(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder of checkpoints with the run `a`, which was started with options of its own, elsewhere."""
    preset = get_preset("pi05_lerobot")
    config = dataclasses.replace(
        with_absolute_paths(preset),
        exp_name="a",
        batch_size=6,
        checkpoint_base_dir="elsewhere",
        # Together right; the preset's warm-up with this decay would be refused.
        lr_schedule=dataclasses.replace(preset.lr_schedule, warmup_steps=5, decay_steps=50),
        data=dataclasses.replace(preset.data, path="/data/mine", episodes=(0, 2)),
        model=dataclasses.replace(preset.model, max_token_len=32),
    )
    folder = tmp_path / "pi05_lerobot" / "a"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(config))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["--exp-name=a", "--checkpoint-base-dir={}", "--resume"],
        ["--resume", "--exp_name", "a", "--checkpoint_base_dir", "{}"],
    ],
)
def test_what_is_not_given_is_as_it_was(runs: pathlib.Path, words: list[str]) -> None:
    config = parse(*[word.format(runs) for word in words], "--num-train-steps=70", "--lr-schedule.decay-steps=60")
    assert config.resume and config.checkpoint_base_dir == str(runs)
    assert (config.batch_size, config.data.path, config.data.episodes) == (6, "/data/mine", (0, 2))
    assert (config.model.max_token_len, config.lr_schedule.warmup_steps) == (32, 5)
    assert (config.num_train_steps, config.lr_schedule.decay_steps) == (70, 60)
    file = runs / "pi05_lerobot" / "a" / "config.json"
    assert changed_options(file, config) == [
        "--lr-schedule.decay-steps 60 (was 50)",
        "--num-train-steps 70 (was 30000)",
    ]


@pytest.mark.parametrize(
    "words", [["--exp-name=a"], ["--exp-name=a", "--resume", "--no-resume"], ["--exp-name=b", "--resume"], ["--resume"]]
)
def test_other_starts_go_by_the_named_config(runs: pathlib.Path, words: list[str]) -> None:
    config = parse(f"--checkpoint-base-dir={runs}", *words)
    assert config.batch_size == get_preset("pi05_lerobot").batch_size and config.data.path is None
    assert changed_options(runs / "none" / "config.json", config) == []


def test_what_is_written_holds_from_everywhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse("--data.path=mine", "--data.tokenizer-path=~/t.model", "--exp-name=a")
    written = with_absolute_paths(config)
    assert (written.data.path, written.assets_base_dir) == (str(tmp_path / "mine"), str(tmp_path / "assets"))
    assert written.data.tokenizer_path == os.path.expanduser("~/t.model") and written.data.packed is None
    (tmp_path / "config.json").write_text(to_json(written))
    assert changed_options(tmp_path / "config.json", config) == []


def test_a_damaged_file_is_named(runs: pathlib.Path) -> None:
    file = runs / "pi05_lerobot" / "a" / "config.json"
    file.write_text('{"name": "pi05_lerobot", "data"')
    with pytest.raises(UserError, match="does not hold a training config.*Move it away"):
        parse(f"--checkpoint-base-dir={runs}", "--exp-name=a", "--resume")


def test_the_command_that_is_printed_resumes_the_run(runs: pathlib.Path) -> None:
    started = dataclasses.replace(get_preset("pi05_lerobot"), exp_name="a", checkpoint_base_dir=f"{runs}")
    words = shlex.split(resume_command(started, "scripts/train.py"))
    assert words[:3] == ["python", "scripts/train.py", "pi05_lerobot"]
    config = parse_train_config(words[2:], prog="train", description="")
    assert config.resume and config.batch_size == 6 and config.checkpoint_base_dir == str(runs)
    usual = dataclasses.replace(started, checkpoint_base_dir="checkpoints")
    assert resume_command(usual, "scripts/demo.py") == "python scripts/demo.py pi05_lerobot --exp-name=a --resume"
