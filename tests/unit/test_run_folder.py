"""A run that is overwritten is lost only once the new one is under way."""

import json
import pathlib
import shutil
import threading

import pytest

from openpi_accel.errors import UserError
from openpi_accel.train import run_folder as module
from openpi_accel.train.run_folder import (
    check_run_folder,
    discard_replaced,
    discard_start,
    find_checkpoint,
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


def as_rank_1(monkeypatch: pytest.MonkeyPatch, first: dict[str, object]) -> None:
    """This process is the second of two; the first one says `first`, its time up after three looks."""
    looks = iter(range(10**6))

    def gather_texts(text: str) -> list[str]:
        return [json.dumps({"problem": "", "over": next(looks) >= 3} | first), text]

    monkeypatch.setattr(module, "gather_texts", gather_texts)
    monkeypatch.setattr(module, "_POLL_S", 0.05)


def test_a_checkpoint_that_this_node_sees_late_is_waited_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_checkpoint(tmp_path / "run", 5)
    as_rank_1(monkeypatch, {"step": 11, "over": False})
    threading.Timer(0.3, run_with_checkpoint, (run, 11)).start()
    assert find_checkpoint(run, resume=True, overwrite=False, timeout_s=60) == 11


def test_two_nodes_never_go_on_from_different_checkpoints(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_checkpoint(tmp_path / "run", 5)
    as_rank_1(monkeypatch, {"step": 11})
    with pytest.raises(UserError, match=r"holds checkpoint 11, which rank 1 did not see .*one folder on storage"):
        find_checkpoint(run, resume=True, overwrite=False, timeout_s=60)
    as_rank_1(monkeypatch, {"step": 3})  # the stale listing is the other's
    with pytest.raises(UserError, match="holds checkpoint 5, which rank 0 did not see"):
        find_checkpoint(run, resume=True, overwrite=False, timeout_s=60)
    as_rank_1(monkeypatch, {"step": None, "problem": "nothing to resume"})
    with pytest.raises(UserError, match="holds checkpoint 5, which rank 0 did not see"):
        find_checkpoint(run, resume=True, overwrite=False, timeout_s=60)


def test_a_mistake_that_all_see_is_told_at_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank_1(monkeypatch, {"step": None, "problem": "rank 0 has no such run either"})
    with pytest.raises(UserError, match="there is nothing to resume"):
        find_checkpoint(tmp_path / "run", resume=True, overwrite=False, timeout_s=60)
    monkeypatch.undo()
    assert find_checkpoint(tmp_path / "run", resume=False, overwrite=False, timeout_s=0) is None
