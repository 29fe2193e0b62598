"""lerobot's own reader as the baseline: equal batches, and a word where it is not there or does not read the format."""

import dataclasses
import importlib.metadata
import json
import pathlib
import sys
import types
from typing import ClassVar

import jax
import numpy as np
import pytest

from openpi_accel.build.data import build_source
from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.presets import get_preset
from openpi_accel.data.lerobot.baseline import BaselineReader, _pixels
from openpi_accel.data.lerobot.dataset import open_dataset
from openpi_accel.data.lerobot.frames import FrameError
from openpi_accel.errors import UserError
from openpi_accel.tools.bench_data import main as bench_data
from tests.data_fakes import unit_stats, write_tokenizer
from tests.lerobot_writer import CAMERA, write_dataset


class LeRobotDataset:
    """Has the interface of lerobot's class, as far as it is used: items of channel-first floats. Row 5 is damaged."""

    opened: ClassVar[list] = []

    def __init__(self, repo_id, root=None, delta_timestamps=None):
        if "unknown" in str(root):
            raise ValueError("\nThe dataset is in 2.1 format.\nSee the docs")
        self.opened.append((repo_id, root, delta_timestamps))
        self._data = open_dataset(pathlib.Path(root))
        ((self._key, seconds),) = delta_timestamps.items()
        self._steps = [round(second * self._data.fps) for second in seconds]
        assert self._steps == list(range(len(seconds)))

    def __len__(self):
        return self._data.num_frames

    def __getitem__(self, row):
        if row == 5:
            raise RuntimeError("bad frame")
        assert type(row) is int
        actions, is_pad = self._data.chunk(self._key, np.array([row]), len(self._steps))
        item = {key: self._data.column(key)[row] for key in ("observation.state", "task_index")}
        item |= {self._key: actions[0], f"{self._key}_is_pad": is_pad[0], "task": self._data.task_of([row])[0]}
        frame = self._data.frames(CAMERA, np.array([row]))[0]
        return item | {CAMERA: (frame.astype(np.float32) / 255).transpose(2, 0, 1)}


@pytest.fixture
def lerobot(monkeypatch):
    for name in ("lerobot", "lerobot.datasets", "lerobot.datasets.lerobot_dataset"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = sys.modules["lerobot.datasets.lerobot_dataset"]
    module.LeRobotDataset, module.CODEBASE_VERSION = LeRobotDataset, "v3.0"
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.8.7" if name == "lerobot" else version(name))
    monkeypatch.setattr(LeRobotDataset, "opened", [])


def sources(folder, *options):
    root = write_dataset(folder / "d", version="v3.0", kind="image", lengths=(5, 9))
    arguments = [
        "pi05_lerobot", f"--data.path={root}", f"--data.tokenizer-path={write_tokenizer(folder)}",
        "--model.no-discrete-state-input", f"--data.cameras.base-0-rgb={CAMERA}", "--loss.mask-padded-steps",
    ]  # fmt: skip
    for reader in ("native", "lerobot"):
        config = parse_train_config([*arguments, f"--data.reader={reader}"], prog="t", description="t")
        yield build_source(config, Acceleration(), Environment.from_env({}), norm_stats=unit_stats)[1]


@pytest.mark.usefixtures("lerobot")
def test_the_batches_are_equal(tmp_path):
    native, baseline = sources(tmp_path)
    rows = np.array([13, 0, 4, 2, 4])
    one, other = native.load_batch(rows), baseline.load_batch(rows)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    ((repo_id, root, steps),) = LeRobotDataset.opened
    assert (repo_id, root.name) == ("d", "d") and [*steps] == ["action"] and len(steps["action"]) == 10
    with pytest.raises(
        FrameError, match=r"episode 1, frame 0, camera any: lerobot cannot read it \(bad frame.\)"
    ) as error:
        baseline.load_batch(np.array([1, 5]))
    assert error.value.row == 5


def test_every_stored_pixel_comes_back():
    values = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    np.testing.assert_array_equal(_pixels(values.astype(np.float32) / np.float32(255)), values.transpose(1, 2, 0))
    np.testing.assert_array_equal(_pixels(values), values.transpose(1, 2, 0))


def test_without_lerobot(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lerobot", None)
    with pytest.raises(UserError, match="lerobot cannot be imported .*pip install.*--data.reader native"):
        list(sources(tmp_path))


@pytest.mark.usefixtures("lerobot")
def test_a_format_that_it_does_not_read(tmp_path):
    dataset = open_dataset(write_dataset(tmp_path / "unknown", version="v3.0"))
    with pytest.raises(UserError, match=r"lerobot 9.8.7 cannot open .*The dataset is in 2.1 format. Releases up to"):
        BaselineReader(dataset, "observation.state", "action", 10)
    older = open_dataset(write_dataset(tmp_path / "older", version="v2.1"))
    with pytest.raises(UserError, match=r"lerobot 9.8.7 cannot open .*\(format v2.1\): it reads v3.0. Releases"):
        BaselineReader(older, "observation.state", "action", 10)
    assert not LeRobotDataset.opened  # which might have asked the network


def test_no_pack_beside_it():
    preset = get_preset("pi05_lerobot")
    with pytest.raises(UserError, match="--data.packed is read natively"):
        dataclasses.replace(preset, data=dataclasses.replace(preset.data, reader="lerobot", packed="p"))


@pytest.mark.usefixtures("lerobot")
def test_the_benchmark_has_a_row_for_it(tmp_path, capsys):
    root = write_dataset(tmp_path / "d", version="v3.0", kind="image", lengths=(4,))  # without the damaged row
    arguments = [
        "pi05_lerobot", f"--data.path={root}", f"--data.tokenizer-path={write_tokenizer(tmp_path)}", "--batch-size=2",
        "--model.no-discrete-state-input", "--workers=", "--batches=1", "--json",
    ]  # fmt: skip
    assert bench_data([*arguments, "--readers=native,lerobot"], {}) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["reader"] for line in lines if line["what"] == "batch"} == {"files", "lerobot"}
    with pytest.raises(UserError, match="there is no reader 'robot'"):
        bench_data([*arguments, "--readers=robot"], {})
