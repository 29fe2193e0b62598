"""Room for checkpoints: their size, how many there are at once, and what follows."""

import collections
import pathlib

import jax
import pytest

from openpi_accel.errors import UserError
from openpi_accel.train import disk_space
from openpi_accel.train.disk_space import check_disk_space, checkpoint_bytes, judge, most_at_once
from openpi_accel.train.run_folder import committed_steps
from openpi_accel.train.watch import LoopConfig
from openpi_accel.types import TrainState
from tests.unit import toy

SCHEDULE = LoopConfig(num_train_steps=10, batch_size=1, log_interval=1, save_interval=3)  # saves 3, 6, 9
Usage = collections.namedtuple("Usage", "total used free")


def state_of(num_floats: int) -> TrainState:
    leaf = jax.ShapeDtypeStruct((num_floats,), "float32")
    return TrainState(step=jax.ShapeDtypeStruct((), "int32"), params={"w": leaf}, opt_state=(), ema_params=None)


def check(folder: pathlib.Path, *, resume_from: int | None = None, overwrite: bool = False) -> str:
    """One checkpoint takes 4 kB and a step."""
    return check_disk_space(
        folder, state_of(1000), SCHEDULE, resume_from=resume_from, overwrite=overwrite, keep_period=None
    )


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> collections.deque[int]:
    """A stand-in for the disk; its last number is the free bytes."""
    room: collections.deque[int] = collections.deque([0])
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: Usage(10**9, 0, room[-1]))
    return room


def test_size_is_that_of_what_is_stored(tmp_path: pathlib.Path) -> None:
    for ema_decay, copies in ((None, 3), (0.9, 4)):  # weights, two moments, average
        run = tmp_path / str(copies)
        result, _ = toy.train(run, 1, ema_decay=ema_decay)
        size = checkpoint_bytes(jax.eval_shape(lambda state: state, result.state))
        num_weights = toy.WIDTH * 64 + 64 * 4
        assert 4 * num_weights * copies < size < 4 * num_weights * copies + 64  # and a few counts
        parts = ("params", "train_state")
        written = sum(f.stat().st_size for part in parts for f in (run / "0" / part).rglob("*") if f.is_file())
        assert size / 3 < written < 3 * size  # zeros are compressed, descriptions added


@pytest.mark.parametrize(
    ("saves", "existing", "keep_period", "max_to_keep", "most"),
    [
        ([], [], None, 1, 0),
        ([9], [], None, 1, 1),
        ([3, 6, 9], [], None, 1, 2),
        ([3, 6, 9], [], None, 2, 3),
        ([2, 4, 6, 8, 9], [], 4, 1, 3),  # 4 stays, 8 is the older one while 9 is written
        ([2, 4, 6, 8, 10, 11], [], 4, 1, 4),  # 4, 8, 10 and 11
        ([6, 9], [3], None, 1, 1),  # 3 is there already
        ([6, 9], [2, 3], None, 1, 1),
        ([6, 8], [2, 4], 4, 1, 2),
    ],
)
def test_most_at_once(saves: list[int], existing: list[int], keep_period: int, max_to_keep: int, most: int) -> None:
    assert most_at_once(saves, existing, keep_period=keep_period, max_to_keep=max_to_keep) == most


def test_the_count_is_what_a_run_leaves(tmp_path: pathlib.Path) -> None:
    toy.train(tmp_path, 10, save_interval=2, keep_period=4)
    schedule = LoopConfig(num_train_steps=10, batch_size=1, log_interval=1, save_interval=2)
    saves = [index for index in range(10) if schedule.saves_after(index, 0)]
    assert saves == [2, 4, 6, 8, 9] and committed_steps(tmp_path) == [4, 8, 9]
    assert most_at_once(saves, [], keep_period=4) == 3


def test_what_is_said() -> None:
    run = pathlib.Path("checkpoints/a/b")
    assert judge(run, 100 * 10**9, 50 * 10**9, 2, keep_period=None) == ("", "")
    assert judge(run, 0, 50 * 10**9, 0, keep_period=None) == ("", "")  # nothing will be saved
    error, warning = judge(run, 49 * 10**9, 50 * 10**9, 2, keep_period=None)
    assert "45.6 GiB are free" in error and "one takes 46.6 GiB" in error and "--checkpoint-base-dir" in error
    assert warning == ""
    error, warning = judge(run, 60 * 10**9, 50 * 10**9, 2, keep_period=None)
    assert (
        error == ""
        and "room for 1 of them" in warning
        and "needs room for 2. " in warning
        and "keep-period" not in warning
    )
    _, warning = judge(run, 160 * 10**9, 50 * 10**9, 7, keep_period=5000)
    assert "room for 3 of them" in warning and "needs room for 7, with those that stay" in warning
    assert "--keep-period, now 5000, or None" in warning


def test_free_space_decides(tmp_path: pathlib.Path, free: collections.deque[int]) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    with pytest.raises(UserError, match="another --checkpoint-base-dir"):
        check(folder)
    free.append(5000)
    assert "room for 2" in check(folder)
    free.append(9000)
    assert check(folder) == ""
    assert list(tmp_path.iterdir()) == []


def test_what_the_start_frees_counts_as_free(tmp_path: pathlib.Path, free: collections.deque[int]) -> None:
    (tmp_path / "7" / "params").mkdir(parents=True)
    (tmp_path / "7" / "params" / "d").write_bytes(b"x" * 9000)
    with pytest.raises(UserError):
        check(tmp_path)
    with pytest.raises(UserError):
        check(tmp_path, overwrite=True)  # what is overwritten stays until the new run has a checkpoint
    (tmp_path / "7").rename(tmp_path / "unfinished")
    assert check(tmp_path, overwrite=True) == ""
    (tmp_path / "unfinished").rename(tmp_path / "7")
    free.append(5000)
    assert check(tmp_path, resume_from=7) == ""  # 9 alone is to come, beside 7
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "9.orbax-checkpoint-tmp" / "d").write_bytes(b"x" * 4500)
    free.append(0)
    assert check(tmp_path, resume_from=7) == ""


def test_a_file_system_that_tells_nothing_is_trusted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: Usage(0, 0, 0))
    assert check(tmp_path) == ""
