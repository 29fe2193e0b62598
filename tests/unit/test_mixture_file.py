"""The mixture file: what it says, and what is refused with a word on how to mend it."""

import dataclasses
import json
from fractions import Fraction

import pytest

from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import CameraKeys, DataConfig
from openpi_accel.data.mixture_file import part_named, read_mixture
from openpi_accel.errors import UserError

BASE = DataConfig(repo_id="base/name", default_prompt="do it", mixture="x.json", val_fraction=0.1)


def write(folder, *parts, **further):
    path = folder / "mixture.json"
    path.write_text(json.dumps({"parts": parts} | further))
    return path


def test_what_it_says(tmp_path):
    lift, pour = read_mixture(
        write(
            tmp_path,
            {
                "path": "data/lift", "weight": 2, "asset_id": "me/lift", "cameras": {"base_0_rgb": "top"},
                "state_key": "s", "action_key": "a", "default_prompt": "lift", "delta_action_dims": 6,
                "normalization": "zscore", "episodes": [0, 2], "keep_frames": "keep.json", "val_fraction": 0.5,
                "packed": "/packs/lift",
            },
            {"repo_id": "me/pour", "weight": 0.1, "name": "tea", "episodes": None},
        ),
        BASE,
    )  # fmt: skip
    assert (lift.name, lift.weight, pour.name, pour.weight) == ("lift", 2, "tea", Fraction(1, 10))
    assert lift.data == DataConfig(
        repo_id="local/dataset", path=str(tmp_path / "data/lift"), asset_id="me/lift",
        cameras=CameraKeys(base_0_rgb="top"), state_key="s", action_key="a", default_prompt="lift",
        delta_action_dims=6, normalization="zscore", episodes=(0, 2), keep_frames=str(tmp_path / "keep.json"),
        val_fraction=0.5, packed="/packs/lift",
    )  # fmt: skip
    assert pour.data == dataclasses.replace(BASE, mixture=None, repo_id="me/pour")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"weigth": 1}, "part 1 has an unknown field 'weigth'. Did you mean 'weight'"),
        ({"colour": 1, "weight": 1}, "Known are name, weight, path"),
        ({}, "part 1 has no weight; it must be a number above 0"),
        ({"weight": 0}, "has the weight 0; it must"),
        ({"weight": -0.5}, "has the weight -0.5"),
        ({"weight": True}, "has the weight True"),
        ({"weight": "3"}, "has the weight '3'"),
        ({"weight": 1, "path": None}, "names no dataset"),
        ({"weight": 1, "path": 3}, "path is 3; it must be a folder"),
        ({"weight": 1, "episodes": [0, -1]}, "episodes is [0, -1]; it must be a list of episode numbers"),
        ({"weight": 1, "cameras": {"base_rgb": "a"}}, "unknown field 'base_rgb'. Did you mean 'base_0_rgb'"),
        ({"weight": 1, "val_fraction": 1.5}, "val_fraction is 1.5; it must be a number of at least 0 and below 1"),
        ({"weight": 1, "normalization": "minmax"}, "it must be 'quantile' or 'zscore'"),
        ({"weight": 1, "path": "other/first"}, "2 parts are called 'first'"),
    ],
)
def test_what_is_refused(tmp_path, part, message):
    path = write(tmp_path, {"path": "first", "weight": 1}, {"path": "second"} | part)
    with pytest.raises(UserError) as error:
        read_mixture(path, BASE)
    assert str(path) in str(error.value) and message in str(error.value)


def test_no_such_file_or_no_list(tmp_path):
    with pytest.raises(UserError, match="--data.mixture: .*none.json could not be read"):
        read_mixture(tmp_path / "none.json", BASE)
    for text in ("{", "[]", '{"parts": []}', '{"parts": {"a": 1}}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match="It should look like"):
            read_mixture(tmp_path / "bad.json", BASE)
    with pytest.raises(UserError, match="unknown field 'datasets'"):
        read_mixture(write(tmp_path, {"path": "first", "weight": 1}, datasets=[]), BASE)


def test_a_part_by_its_name(tmp_path):
    parts = read_mixture(write(tmp_path, {"path": "a", "weight": 1}, {"path": "b", "weight": 1}), BASE)
    assert part_named(parts, "b", "--part") is parts[1]
    with pytest.raises(UserError, match="name one of its parts with --part: a, b"):
        part_named(parts, None, "--part")
    with pytest.raises(UserError, match="No part of the mixture is called 'c'"):
        part_named(parts, "c", "--part")


def test_options_of_one_dataset_are_refused_beside_it():
    preset = get_preset("pi05_lerobot")
    data = dataclasses.replace(preset.data, mixture="m.json", path="somewhere", episodes=(1,))
    with pytest.raises(UserError, match="--data.path and --data.episodes .*write them into the parts of m.json"):
        dataclasses.replace(preset, data=data)
