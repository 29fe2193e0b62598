"""The time of a checkpoint: what is written is read again and compared, and nothing is left behind."""

import json
import pathlib

import jax.numpy as jnp
import pytest

from openpi_accel.errors import UserError
from openpi_accel.tools import bench_checkpoint

TINY = ["pi05_demo", "--model.dtype=float32"]


@pytest.mark.parametrize(("options", "saves", "copies"), [(["--saves=1"], 1, 1), (["--whole"], 2, 4)])
def test_it_reports_a_round_trip_and_leaves_nothing(tmp_path: pathlib.Path, capsys, options, saves, copies) -> None:
    assert bench_checkpoint.main([*TINY, "--folder", str(tmp_path), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] and report["num_params"] > 1e6
    assert len(report["saves"]) == saves and report["load_s"] > 0
    assert all(0 < save["blocked_s"] <= save["save_s"] for save in report["saves"])
    # Compressed; Adam's averages of a state that never stepped are zeros.
    assert min(copies, 2) * report["num_params"] < report["bytes_on_disk"] < copies * 4.5 * report["num_params"]
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_gives_back_other_numbers_is_seen(tmp_path: pathlib.Path, capsys, monkeypatch) -> None:
    real = bench_checkpoint.load_base_params

    def damaged(*arguments):
        loaded, report = real(*arguments)
        leaf = loaded["action_in_proj"]["kernel"]
        loaded["action_in_proj"]["kernel"] = jnp.asarray(leaf).at[0, 0].add(1)
        return loaded, report

    monkeypatch.setattr(bench_checkpoint, "load_base_params", damaged)
    assert bench_checkpoint.main([*TINY, "--folder", str(tmp_path)]) == 1
    assert not json.loads(capsys.readouterr().out)["equal"]


def test_a_folder_that_is_a_file_is_told(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--folder"):
        bench_checkpoint.main([*TINY, "--folder", str(tmp_path / "file")])
