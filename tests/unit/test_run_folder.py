"""A run that is overwritten is lost only once the new one is under way."""

import pathlib
import shutil

import pytest

from openpi_accel.errors import UserError
from openpi_accel.train.run_folder import (
    check_run_folder,
    discard_replaced,
    discard_start,
    prepare_run_folder,
    replaced_folder,
    restore_replaced,
)


def run_with_checkpoint(folder: pathlib.Path, step: int) -> pathlib.Path:
    (folder / str(step) / "params").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("old")
    return folder


def test_looking_changes_nothing(tmp_path: pathlib.Path) -> None:
    run = run_with_checkpoint(tmp_path / "run", 7)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    assert check_run_folder(run, resume=True, overwrite=False) == 7
    assert check_run_folder(run, resume=False, overwrite=True) is None
    with pytest.raises(UserError, match=r"last checkpoint: 7.*RESUME=1"):
        check_run_folder(run, resume=False, overwrite=False)
    with pytest.raises(UserError, match="Runs that can be resumed there: run"):
        check_run_folder(tmp_path / "rum", resume=True, overwrite=False)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_an_overwritten_run_comes_back_if_the_new_one_came_to_nothing(tmp_path: pathlib.Path) -> None:
    run = run_with_checkpoint(tmp_path / "run", 7)
    prepare_run_folder(run, resume=False, overwrite=True)
    assert list(run.iterdir()) == []
    (run / "metrics.jsonl").write_text("new")
    (run / "not_finite_step_0.json").write_text("ids")
    assert restore_replaced(run)
    assert (run / "not_finite_step_0.json").read_text() == "ids"  # the message that ended the new run names it
    assert (run / "metrics.jsonl").read_text() == "old" and (run / "7" / "params").is_dir()
    assert not restore_replaced(run)  # nothing more to put back, and nothing is lost by asking
    assert (run / "7" / "params").is_dir() and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_came_to_nothing_leaves_its_name_free(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    prepare_run_folder(run, resume=False, overwrite=False)
    (run / "config.json").write_text("{}")
    (run / "environment.json").write_text("{}")
    (run / "metrics.jsonl").touch()
    (run / "tensorboard").mkdir()
    discard_start(run)
    assert not run.exists()
    for name, text in (("metrics.jsonl", "a row"), ("not_finite_step_3.json", "ids"), ("notes.txt", "a person's")):
        run.mkdir()
        (run / name).write_text(text)
        discard_start(run)
        assert (run / name).read_text() == text
        shutil.rmtree(run)
    run_with_checkpoint(run, 7)
    (run / "metrics.jsonl").write_text("")
    discard_start(run)
    assert (run / "7" / "params").is_dir()


def test_a_new_run_that_was_killed_before_its_first_save_costs_nothing(tmp_path: pathlib.Path) -> None:
    run = run_with_checkpoint(tmp_path / "run", 7)
    prepare_run_folder(run, resume=False, overwrite=True)
    (run / "metrics.jsonl").write_text("a row")  # then kill -9
    with pytest.raises(UserError, match=r"was to overwrite is still there.*mv .*\.run\.replaced"):
        check_run_folder(run, resume=True, overwrite=False)
    prepare_run_folder(run, resume=False, overwrite=True)
    assert list(run.iterdir()) == [] and (replaced_folder(run) / "7" / "params").is_dir()
    run_with_checkpoint(run, 3)
    assert not restore_replaced(run)  # a run with a checkpoint came to something
    shutil.rmtree(run / "3")
    assert restore_replaced(run) and (run / "7" / "params").is_dir()


def test_it_is_gone_once_the_new_one_is_under_way(tmp_path: pathlib.Path) -> None:
    run = run_with_checkpoint(tmp_path / "run", 7)
    prepare_run_folder(run, resume=False, overwrite=True)
    discard_replaced(run)
    assert not restore_replaced(run) and [path.name for path in tmp_path.iterdir()] == ["run"]
    assert list(run.iterdir()) == []
