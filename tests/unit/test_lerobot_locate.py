"""Datasets are found by path, in lerobot's folder and in the Hub's cache; never by the network."""

import os
import pathlib
import socket

import pytest

from openpi_accel.config.environment import Environment
from openpi_accel.data.lerobot.locate import find_dataset
from openpi_accel.errors import UserError


@pytest.fixture
def environment(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.setattr(socket, "socket", None)
    return Environment.from_env({"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")})


def make(folder: pathlib.Path) -> pathlib.Path:
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "info.json").write_text("{}")
    return folder


def test_a_given_folder_is_taken_alone(tmp_path: pathlib.Path, environment: Environment) -> None:
    make(environment.hf_lerobot_home / "org/name")
    folder = make(tmp_path / "mine")
    assert find_dataset("org/name", str(folder), environment) == folder
    with pytest.raises(UserError, match=r"no folder .*/yours\. Give the dataset.s folder: --data\.path .*DATA_PATH"):
        find_dataset("org/name", str(tmp_path / "yours"), environment)


def test_order_of_places(environment: Environment) -> None:
    hub = environment.hf_hub_cache / "datasets--org--name"
    snapshot = make(hub / "snapshots" / "abc")
    assert find_dataset("org/name", None, environment) == snapshot
    own_hub = make(environment.hf_lerobot_home / "hub" / "datasets--org--name" / "snapshots" / "def")
    assert find_dataset("org/name", None, environment) == own_hub
    home = make(environment.hf_lerobot_home / "org/name")
    assert find_dataset("org/name", None, environment) == home


def test_the_main_branch_else_the_newest_whole_snapshot(environment: Environment) -> None:
    hub = environment.hf_hub_cache / "datasets--org--name"
    old, new, partial = make(hub / "snapshots/old"), make(hub / "snapshots/new"), hub / "snapshots/partial"
    partial.mkdir()
    os.utime(old, (1, 1))
    os.utime(new, (2, 2))
    assert find_dataset("org/name", None, environment) == new
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("old\n")
    assert find_dataset("org/name", None, environment) == old
    (hub / "refs/main").write_text("partial")
    assert find_dataset("org/name", None, environment) == new


def test_nowhere(environment: Environment) -> None:
    with pytest.raises(
        UserError,
        match=r"org/name is not on this machine.*DATA_PATH[^\n]*\n    hf download org/name --repo-type dataset",
    ):
        find_dataset("org/name", None, environment)
