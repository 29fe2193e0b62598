"""What a run reads and does not find: all of it in one message, with commands that mend it when followed literally."""

import dataclasses
import pathlib
import re
import shlex

import pytest

from openpi_accel.build.files import FileOptions, base_weights, require_files
from openpi_accel.config.environment import Environment
from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import TrainConfig
from openpi_accel.data.lerobot.locate import find_dataset
from openpi_accel.data.norm_stats import norm_stats_path
from openpi_accel.data.tokenizer import find_tokenizer
from openpi_accel.errors import UserError
from tests.conftest import REPO


@pytest.fixture
def environment(tmp_path: pathlib.Path) -> Environment:
    return Environment.from_env({"HOME": str(tmp_path / "a home")})


def config_of(name: str, assets: pathlib.Path, path: str | None = None, weights: str | None = "same") -> TrainConfig:
    config = get_preset(name)
    config = dataclasses.replace(config, assets_base_dir=str(assets), data=dataclasses.replace(config.data, path=path))
    if weights != "same":
        loader = dataclasses.replace(config.weight_loader, params_path=weights)
        config = dataclasses.replace(config, weight_loader=loader)
    return config


def command_in(message: str, program: str) -> list[str]:
    """The words of the one command line of `program` in a message."""
    (line,) = [line for line in message.splitlines() if re.search(rf"^ {{4}}.*\b{program}\b", line)]
    return shlex.split(line)


def make(folder: pathlib.Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def test_all_that_is_missing_is_told_at_once(tmp_path, environment):
    config = config_of("pi05_lerobot", tmp_path, path=str(tmp_path / "none"))
    with pytest.raises(UserError) as caught:
        require_files(config, environment, weights=True)
    message = str(caught.value)
    assert message.startswith("4 things are missing")
    for number, words in enumerate(
        ("dataset: There is no folder", "tokenizer: ", "norm statistics: ", "base weights: "), start=1
    ):
        assert f"\n{number}. {words}" in message
    assert "compute_norm_stats.py --config-name=pi05_lerobot" in message and "curl " in message


def test_one_thing_is_told_alone_and_nothing_where_all_is_there(tmp_path, environment):
    config = config_of("pi05_libero", REPO / "assets", path=str(tmp_path), weights=None)
    with pytest.raises(UserError, match=r"^PaliGemma's tokenizer is neither at"):
        require_files(config, environment, weights=True)
    make(environment.openpi_data_home, "big_vision/paligemma_tokenizer.model")
    require_files(config, environment, weights=True)
    assert base_weights(config, environment) is None


def test_the_tools_own_options_are_named(tmp_path, environment):
    config = config_of("pi05_libero", tmp_path, path=str(tmp_path / "none"))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer_path="none.model"))
    with pytest.raises(UserError) as caught:
        require_files(config, environment, options=FileOptions(dataset="--data", tokenizer="--tokenizer"))
    assert "folder: --data." in str(caught.value) and "--tokenizer is none.model" in str(caught.value)
    assert "DATA_PATH" not in str(caught.value) and "--data.tokenizer-path" not in str(caught.value)


@pytest.mark.parametrize("given", [None, "my data"])
def test_the_datasets_command_makes_it_found(tmp_path, environment, given):
    path = None if given is None else str(tmp_path / given)
    with pytest.raises(UserError) as caught:
        find_dataset("physical-intelligence/libero", path, environment)
    words = command_in(str(caught.value), "hf")
    assert words[:5] == ["hf", "download", "physical-intelligence/libero", "--repo-type", "dataset"]
    # What `hf download` does with these words: into --local-dir, else into a snapshot of the Hub's cache.
    if given is None:
        assert len(words) == 5
        folder = environment.hf_hub_cache / "datasets--physical-intelligence--libero/snapshots/abc"
    else:
        assert words[5] == "--local-dir"
        folder = pathlib.Path(words[6])
    make(folder, "meta/info.json")
    assert find_dataset("physical-intelligence/libero", path, environment) == folder


def test_no_download_is_promised_for_names_that_nobody_knows(tmp_path, environment):
    with pytest.raises(UserError) as caught:
        find_dataset("local/dataset", None, environment)
    assert "hf download" not in str(caught.value) and "--data.path" in str(caught.value)
    with pytest.raises(UserError, match="hf download") as caught:
        find_dataset("me/mine", str(tmp_path / "x"), environment)
    assert "if me/mine is a dataset on the Hugging Face Hub (private ones need `hf auth login`)" in str(caught.value)


def test_the_tokenizers_command_makes_it_found(environment):
    with pytest.raises(UserError) as caught:
        find_tokenizer(None, environment)
    assert max(len(line) for line in str(caught.value).splitlines()) < 250
    words = command_in(str(caught.value), "curl")
    target = pathlib.Path(words[words.index("-o") + 1])
    make(target.parent, target.name)
    assert find_tokenizer(None, environment) == target


@pytest.mark.parametrize("given", ["same", "my weights/pi05_base/params", "my weights"])
def test_the_weights_commands_make_them_found(tmp_path, environment, given):
    weights = given if given == "same" else str(tmp_path / given)
    for name in ("pi05_libero", "pi0_libero"):
        config = config_of(name, tmp_path, weights=weights)
        with pytest.raises(UserError) as caught:
            base_weights(config, environment)
        words = command_in(str(caught.value), "gcloud")
        made, (source, target) = words[words.index("-p") + 1], words[-2:]
        assert source == get_preset(name).weight_loader.params_path and target == f"{made}/"
        # What `gcloud storage cp -r` does with a folder and a target that is there.
        make(pathlib.Path(target) / "params", "_METADATA")
        assert base_weights(config, environment) == pathlib.Path(target) / "params"
        (pathlib.Path(target) / "params" / "_METADATA").unlink()
        (pathlib.Path(target) / "params").rmdir()


def test_statistics_are_looked_for_where_they_are_needed(tmp_path, environment):
    config = config_of("pi05_libero", tmp_path, path=str(tmp_path), weights=None)
    make(environment.openpi_data_home, "big_vision/paligemma_tokenizer.model")
    require_files(config, environment, statistics=False)
    with pytest.raises(UserError, match="no normalisation statistics"):
        require_files(config, environment)
    other = tmp_path / "other" / "norm_stats.json"
    other.parent.mkdir()
    shipped = norm_stats_path(REPO / "assets", config.name, config.asset_id)
    other.write_text(shipped.read_text())
    require_files(config, environment, norm_stats_file=other)
