"""What the user reads where the checkpoint folder is not one folder; real processes: tests/distributed."""

import pathlib

from openpi_accel.parallel.shared_storage import check_shared_storage, complaint


def view(problem: str, host: str) -> dict[str, str]:
    return {"problem": problem, "where": f"{host}:/ckpt"}


def test_only_the_blind_ranks_are_named() -> None:
    views = {0: view("", "a"), 1: view("no file", "b"), 2: view("", "c"), 3: view("other content", "d")}
    text = complaint(views, 60)
    assert "rank 0 wrote to a:/ckpt was not seen within 60 s by\n    rank 1, b:/ckpt: no file\n    rank 3, d" in text
    assert "rank 2" not in text and "--checkpoint-base-dir must be one folder" in text
    assert complaint({rank: view("", "a") for rank in range(3)}, 60) == ""


def test_a_folder_that_rank_0_cannot_use_is_its_own_message() -> None:
    text = complaint({0: view("it cannot be written to", "a"), 1: view("no file", "b")}, 60)
    assert text.startswith("Rank 0 cannot use") and "rank 1" not in text


def test_a_folder_that_others_only_see_is_its_own_message() -> None:
    refused = view("it cannot be written to (Permission denied)", "b")
    text = complaint({0: view("", "a"), 1: refused, 2: view("", "c")}, 60)
    assert "The checkpoint folder is shared" in text and "\n    rank 1, b:/ckpt: it cannot be written to" in text
    assert "the same user" in text and "rank 2" not in text
    assert "was not seen" in complaint({0: view("", "a"), 1: refused, 2: view("no file", "c")}, 60)


def test_one_process_touches_nothing(tmp_path: pathlib.Path) -> None:
    check_shared_storage(tmp_path / "checkpoints", 0)
    assert list(tmp_path.iterdir()) == []
