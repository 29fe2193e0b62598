"""The loop on a toy model: resume to the bit, one trace, non-finite steps, signals, waiting, failing saves."""

import gc
import itertools
import json
import os
import pathlib
import re
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from openpi_accel.errors import UserError
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.train import start
from openpi_accel.train.guard import Guard
from openpi_accel.train.loop import compile_step
from openpi_accel.train.metrics import hash_sample_ids, read_rows
from openpi_accel.train.preemption import Preemption
from openpi_accel.train.run_folder import committed_steps
from openpi_accel.train.step import make_train_step
from openpi_accel.train.watch import NonFiniteError
from tests.unit import toy


def figures(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Rows without what depends on the clock and on the process."""
    clock = ("samples_per_s", "step_s", "data_wait_share", "host_memory_peak_gib")
    return [{k: v for k, v in row.items() if k not in clock} for row in read_rows(folder / "metrics.jsonl")]


@pytest.mark.parametrize("ema_decay", [0.9, None])
def test_ten_steps_are_five_and_five_to_the_last_bit(tmp_path: pathlib.Path, ema_decay: float | None) -> None:
    straight, step = toy.train(tmp_path / "straight", 10, log_interval=3, ema_decay=ema_decay)
    assert isinstance(step, jax.stages.Compiled)  # which runs the one program and traces no other
    toy.train(tmp_path / "halves", 5, log_interval=3, ema_decay=ema_decay)
    resumed, step = toy.train(tmp_path / "halves", 10, resume=True, log_interval=3, ema_decay=ema_decay)
    assert isinstance(step, jax.stages.Compiled)
    for a, b in zip(toy.leaves(straight.state), toy.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert figures(tmp_path / "straight") == figures(tmp_path / "halves")
    assert [row["step"] for row in figures(tmp_path / "halves")] == [0, 3, 6, 9]


def test_rows_are_means_since_the_last_log_and_hashes(tmp_path: pathlib.Path) -> None:
    toy.train(tmp_path / "all", 7)
    toy.train(tmp_path / "means", 7, log_interval=3)
    every = figures(tmp_path / "all")
    for row, steps in zip(figures(tmp_path / "means"), ([0], [1, 2, 3], [4, 5, 6]), strict=True):
        for name in ("loss", "grad_norm", "param_norm"):
            assert row[name] == pytest.approx(np.mean([every[step][name] for step in steps]), rel=1e-12)
        assert row["learning_rate"] == every[steps[-1]]["learning_rate"]
        first = steps[-1] * toy.BATCH
        assert row["sample_ids_hash"] == hash_sample_ids(np.arange(first, first + toy.BATCH))
    (*_, last) = read_rows(tmp_path / "means" / "metrics.jsonl")
    assert last["samples_per_s"] == pytest.approx(toy.BATCH / last["step_s"])
    assert last["host_memory_peak_gib"] > 0.1


def test_saves_at_the_interval_and_at_the_last_step(tmp_path: pathlib.Path) -> None:
    toy.train(tmp_path, 8, save_interval=3, keep_period=1)
    assert committed_steps(tmp_path) == [3, 6, 7]
    toy.train(tmp_path, 10, resume=True, save_interval=2, keep_period=1)  # begins with 8: not saved, as it is the start
    assert committed_steps(tmp_path) == [3, 6, 7, 9]


def test_a_finished_run_resumes_to_nothing(tmp_path: pathlib.Path) -> None:
    toy.train(tmp_path, 3)
    result, _ = toy.train(tmp_path, 3, resume=True)
    assert (result.next_step, result.exit_code) == (3, 0)
    assert committed_steps(tmp_path) == [2]


@pytest.mark.parametrize("bad_step", [0, 4, 6])
def test_a_non_finite_loss_stops_within_two_steps_and_is_not_saved(tmp_path: pathlib.Path, bad_step: int) -> None:
    drawn: list[int] = []

    def watched() -> Iterator[toy.Loaded]:
        for loaded in toy.batches(0, bad_sample=bad_step * toy.BATCH + 3):
            drawn.append(loaded.next_sample)
            yield loaded

    with pytest.raises(
        NonFiniteError, match=rf"Step {bad_step} is not finite .*loss nan.*scripts/inspect_dataset"
    ) as error:
        toy.train(tmp_path, 7, save_interval=2, loader=watched())
    assert committed_steps(tmp_path) == [step for step in (2, 4, 6) if step < bad_step][-1:]
    (path,) = tmp_path.glob("not_finite_step_*.json")
    assert str(path) in str(error.value)
    content = json.loads(path.read_text())
    assert content["step"] == bad_step
    steps = [int(step) for step in content["sample_ids"]]
    assert steps[0] == bad_step and len(steps) <= 2  # one more was on its way at most
    assert bad_step * toy.BATCH + 3 in content["sample_ids"][str(bad_step)]
    assert [row["step"] for row in figures(tmp_path)] == list(range(bad_step))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_signal_finishes_the_step_and_saves(tmp_path: pathlib.Path, number: int, code: int) -> None:
    before = signal.getsignal(number)

    def signalling() -> Iterator[toy.Loaded]:
        for loaded in toy.batches():
            if loaded.next_sample == 6 * toy.BATCH:
                os.kill(os.getpid(), number)
            yield loaded

    result, _ = toy.train(tmp_path / "stopped", 1000, loader=signalling())
    assert result.exit_code == code
    assert 0 < result.next_step < 20
    assert committed_steps(tmp_path / "stopped") == [result.next_step - 1]
    assert signal.getsignal(number) is before
    toy.train(tmp_path / "stopped", 25, resume=True)
    toy.train(tmp_path / "straight", 25)
    assert figures(tmp_path / "stopped") == figures(tmp_path / "straight")


def test_what_does_not_fit_into_the_grace_is_not_begun(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.train(tmp_path / "stopped", 3)
    monkeypatch.setattr("openpi_accel.train.save_time.ASSUMED_BYTES_PER_S", 100.0)  # minutes, for the toy

    def signalling() -> Iterator[toy.Loaded]:
        for loaded in toy.batches(3 * toy.BATCH):
            if loaded.next_sample == 10 * toy.BATCH:
                os.kill(os.getpid(), signal.SIGTERM)
            yield loaded

    guard = Guard(Preemption(grace_s=30, exit_code=75))
    result, _ = toy.train(tmp_path / "stopped", 1000, resume=True, loader=signalling(), guard=guard)
    assert result.exit_code == 75
    assert re.fullmatch(
        r"a save takes about \d{3} s, and 2[0-6] s are left of --grace-s 30, so none was begun; checkpoint 2 is "
        r"complete: go on with --resume \(launchers: RESUME=1\)",
        result.unsaved,
    )
    assert committed_steps(tmp_path / "stopped") == [2]
    toy.train(tmp_path / "stopped", 25, resume=True)
    toy.train(tmp_path / "straight", 25)
    assert figures(tmp_path / "stopped") == figures(tmp_path / "straight")


def test_waiting_for_data_is_seen(tmp_path: pathlib.Path) -> None:
    def slow() -> Iterator[toy.Loaded]:
        for loaded in toy.batches():
            time.sleep(0.05)
            yield loaded

    toy.train(tmp_path / "slow", 10, log_interval=4, loader=slow())
    row = read_rows(tmp_path / "slow" / "metrics.jsonl")[2]  # steps 5 to 8: what was fetched ahead is used up
    assert row["data_wait_share"] > 0.5
    assert row["step_s"] > 0.04
    ready = list(itertools.islice(toy.batches(), 10))
    toy.train(tmp_path / "quick", 10, log_interval=4, loader=ready)
    assert read_rows(tmp_path / "quick" / "metrics.jsonl")[2]["data_wait_share"] < row["data_wait_share"]


def test_what_the_loader_raises_reaches_the_caller_with_nothing_lost(tmp_path: pathlib.Path) -> None:
    def failing() -> Iterator[toy.Loaded]:
        for loaded in toy.batches():
            if loaded.next_sample > 5 * toy.BATCH:
                raise UserError("frame 17 of episode 3 is damaged")
            yield loaded

    with pytest.raises(UserError, match="frame 17"):
        toy.train(tmp_path, 10, save_interval=2, loader=failing())
    assert committed_steps(tmp_path) == [4]


def test_a_loader_that_ends_early_says_so(tmp_path: pathlib.Path) -> None:
    batches = toy.batches()
    with pytest.raises(UserError, match="The data ended before step 2 of 10"):
        toy.train(tmp_path, 10, loader=[next(batches), next(batches)])


def test_the_first_batch_is_shown(tmp_path: pathlib.Path) -> None:
    seen: list[Any] = []
    toy.train(tmp_path, 3, on_first_batch=seen.append)
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0].batch["x"], next(toy.batches()).batch["x"])


def test_the_last_loss_and_every_complete_checkpoint_are_told(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.train(tmp_path, 8, log_interval=5, save_interval=3, keep_period=1, show=True)
    lines = capsys.readouterr().out.splitlines()
    saved = [f"saved {tmp_path / str(step)} (step {step})" for step in (3, 6, 7)]
    assert [line for line in lines if line.startswith("saved ")] == saved
    (last,) = [line for line in lines if line.startswith("step 7/8 | loss ")]
    assert last.endswith(" (this step alone)") and lines.index(last) < lines.index(saved[-1])
    toy.train(tmp_path, 11, resume=True, log_interval=5, show=True)
    lines = capsys.readouterr().out.splitlines()
    assert not any("this step alone" in line for line in lines)  # step 10 is in the log
    assert sum(line.startswith("step 10/11 | loss ") for line in lines) == 1


# Orbax never awaits the other writes once one has failed; they are collected here, not in a later test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_save_that_does_not_fit_leaves_the_older_checkpoint(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toy.train(tmp_path, 3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files may not grow beyond 1 KiB: the write fails in the middle, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with (
            pytest.warns(UserWarning, match=r"loss_curve\.png could not be written"),  # a picture stops nothing
            pytest.raises(UserError, match="A checkpoint could not be written") as error,
        ):
            toy.train(tmp_path, 1000, resume=True, save_interval=4, log_interval=1000, curve=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.search(rf"{tmp_path}/2 is complete and stays\. If the disk is full, free space", str(error.value))
    assert committed_steps(tmp_path) == [2]
    assert not list(tmp_path.glob("*tmp*"))
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err.split("Exception ignored")[0]
    toy.train(tmp_path, 6, resume=True)
    assert committed_steps(tmp_path) == [5]


def test_parameters_are_born_on_their_shards() -> None:
    assert jax.device_count() == 8
    mesh = make_mesh(8)
    abstract = start.abstract_state(toy.init_params, toy.TX, toy.everything, 0.9, mesh, min_num_elements=1)
    state = start.fresh_state(toy.init_params, jax.random.key(0), abstract, toy.TX, toy.everything, 0.9)
    for leaf, shape in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)
    assert state.opt_state[1][0].nu["hidden"]["kernel"].addressable_shards[3].data.shape == (16, 8)
    one = make_mesh(1, jax.devices()[:1])
    on_one = start.abstract_state(toy.init_params, toy.TX, toy.everything, 0.9, one)
    alone = start.fresh_state(toy.init_params, jax.random.key(0), on_one, toy.TX, toy.everything, 0.9)
    for a, b in zip(toy.leaves(state), toy.leaves(alone), strict=True):
        np.testing.assert_array_equal(a, b)


def test_loaded_leaves_replace_fresh_ones() -> None:
    abstract = start.abstract_state(toy.init_params, toy.TX, toy.everything, 0.9, make_mesh(1, jax.devices()[:1]))
    loaded = {"out": {"kernel": jax.numpy.full((64, 4), 5.0)}}
    state = start.fresh_state(toy.init_params, jax.random.key(0), abstract, toy.TX, toy.everything, 0.9, loaded)
    assert state.ema_params is not None
    for params in (state.params, state.ema_params):
        np.testing.assert_array_equal(params["out"]["kernel"], np.full((64, 4), 5.0))
        np.testing.assert_array_equal(
            params["hidden"]["kernel"], jax.jit(toy.init_params)(jax.random.key(0))["hidden"]["kernel"]
        )


def test_the_state_is_donated_whole() -> None:
    mesh = make_mesh(1, jax.devices()[:1])
    abstract = start.abstract_state(toy.init_params, toy.TX, toy.everything, 0.9, mesh)
    step = make_train_step(toy.loss_fn, toy.TX, toy.SCHEDULE, toy.everything, 0.9)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), next(toy.batches()).batch)
    key = jax.eval_shape(jax.random.key, 0)
    jitted = compile_step(step, mesh, start.shardings_of(abstract))
    memory = jitted.lower(abstract, batch, key).compile().memory_analysis()
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    assert memory.alias_size_in_bytes >= state_bytes  # every leaf is updated in its own place
    state = start.fresh_state(toy.init_params, jax.random.key(0), abstract, toy.TX, toy.everything, 0.9)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(buffers)) == len(buffers)  # the average begins as a copy, not as the same memory
