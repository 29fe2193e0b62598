"""Checkpoints: upstream's layout and files, round trips, what may not be resumed, and saves that fail."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from openpi_accel import tree
from openpi_accel.errors import UserError
from openpi_accel.orbax_tree import by_path, stored_leaves
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.train.checkpoint import CheckpointStore, Position
from openpi_accel.train.run_folder import committed_steps, prepare_run_folder
from openpi_accel.train.start import abstract_state, fresh_state
from openpi_accel.types import Params, TrainState
from tests.conftest import NUM_CPU_DEVICES
from tests.unit import toy

EMA = 0.9


def abstract(ema_decay: float | None = EMA, is_trainable=toy.everything) -> TrainState:  # type: ignore[no-untyped-def]
    return abstract_state(toy.init_params, toy.TX, is_trainable, ema_decay, make_mesh(1, jax.devices()[:1]))


def a_state(ema_decay: float | None = EMA, seed: int = 0) -> TrainState:
    """Every leaf another number, so that no two can be exchanged unseen."""
    shapes = abstract(ema_decay)
    state = fresh_state(toy.init_params, jax.random.key(0), shapes, toy.TX, toy.everything, ema_decay)
    flat, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(flat))
    return jax.tree.unflatten(
        treedef,
        [
            jax.random.normal(key, leaf.shape) if leaf.dtype == jnp.float32 else leaf + 7
            for key, leaf in zip(keys, flat, strict=True)
        ],
    )


def assert_equal(a: TrainState, b: TrainState) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def golden_params(shared: pathlib.Path, prefix: str) -> Params:
    with np.load(shared / "goldens" / "pi05_tiny_fp32_orbax_expect.npz") as file:
        return tree.unflatten({n.removeprefix(prefix): file[n] for n in file.files if n.startswith(prefix)})


def golden_abstract(shared: pathlib.Path) -> TrainState:
    raw = golden_params(shared, "params/")
    return abstract_state(
        lambda rng: jax.tree.map(jnp.asarray, raw), toy.TX, toy.everything, EMA, make_mesh(1, jax.devices()[:1])
    )


@pytest.mark.shared
def test_upstream_s_checkpoint_is_a_run_to_resume(shared: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(shared / "goldens" / "pi05_tiny_fp32_orbax", run)
    assert prepare_run_folder(run, resume=True, overwrite=False) == 5
    store = CheckpointStore(run, settings={"ema_decay": EMA})
    state, position = store.restore(5, golden_abstract(shared))
    assert int(state.step) == 6
    assert position.next_sample is None
    for got, prefix in ((state.params, "params/"), (state.ema_params, "ema/")):
        expected = golden_params(shared, prefix)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    adam, _, schedule = state.opt_state[1]
    assert (int(adam.count), int(schedule.count)) == (6, 6)
    with ocp.PyTreeCheckpointer() as checkpointer:
        stored = by_path(checkpointer.restore(run / "5" / "train_state")["opt_state"])
    moments = {
        f"1/0/{part}/{path}/value": leaf for part in ("mu", "nu") for path, leaf in by_path(getattr(adam, part)).items()
    }
    assert set(moments) == set(stored) - {"1/0/count", "1/2/count"}
    for path, leaf in moments.items():
        np.testing.assert_array_equal(leaf, stored[path], err_msg=path)
    store.close()


@pytest.mark.shared
def test_what_we_write_has_upstream_s_tree_to_the_last_key(shared: pathlib.Path, tmp_path: pathlib.Path) -> None:
    golden = shared / "goldens" / "pi05_tiny_fp32_orbax"
    shutil.copytree(golden, tmp_path / "run")
    store = CheckpointStore(
        tmp_path / "run", assets={"physical-intelligence/libero/norm_stats.json": '{"norm_stats": {}}'}
    )
    state, _ = store.restore(5, golden_abstract(shared))
    store.save(7, state, Position(next_sample=0))
    store.close()
    for item in ("params", "train_state"):
        ours, theirs = (
            json.loads((folder / item / "_METADATA").read_text()) for folder in (tmp_path / "run" / "7", golden / "5")
        )
        assert ours["tree_metadata"] == theirs["tree_metadata"]
        assert ours["use_zarr3"] == theirs["use_zarr3"]
    assert (tmp_path / "run" / "7" / "assets/physical-intelligence/libero/norm_stats.json").is_file()


@pytest.mark.parametrize("ema_decay", [EMA, None])
def test_round_trip_and_layout(tmp_path: pathlib.Path, ema_decay: float | None) -> None:
    state = a_state(ema_decay)
    store = CheckpointStore(tmp_path, assets={"me/robot/norm_stats.json": '{"norm_stats": 1}'}, settings={"x": (1, 2)})
    position = Position(next_sample=123, unlogged={"loss": [0.1, 1 / 3]}, skipped=((7, "damaged"),))
    store.save(4, state, position)
    store.wait()
    assert committed_steps(tmp_path) == [4]
    assert json.loads((tmp_path / "4/assets/me/robot/norm_stats.json").read_text()) == {"norm_stats": 1}
    loaded_by_policies = "params/hidden/kernel/value"
    assert loaded_by_policies in stored_leaves(tmp_path / "4" / "params")
    assert (loaded_by_policies in stored_leaves(tmp_path / "4" / "train_state")) == (ema_decay is not None)
    restored, got = store.restore(4, abstract(ema_decay))
    assert_equal(restored, state)
    assert got == position
    store.close()


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path: pathlib.Path) -> None:
    overwrite = jax.jit(lambda s: jax.tree.map(lambda leaf: leaf * 0, s), donate_argnums=0)
    state = a_state()
    expected = jax.tree.map(np.array, state)
    store = CheckpointStore(tmp_path)
    store.save(1, state, Position(next_sample=0))
    for _ in range(5):
        state = overwrite(state)
    store.wait()
    assert_equal(store.restore(1, abstract())[0], expected)
    store.close()


def test_what_lies_on_all_devices_is_sent_by_one_and_nothing_is_cut(tmp_path: pathlib.Path) -> None:
    mesh = make_mesh(1)
    assert mesh.size == NUM_CPU_DEVICES
    state = jax.device_put(a_state(), NamedSharding(mesh, PartitionSpec()))
    expected = jax.tree.map(np.array, state)
    sizes = {leaf.shape[0] % NUM_CPU_DEVICES for leaf in jax.tree.leaves(state) if leaf.ndim}
    assert 0 in sizes  # Orbax would have found something to cut
    overwrite = jax.jit(lambda s: jax.tree.map(lambda leaf: leaf * 0, s), donate_argnums=0)
    jax.block_until_ready(overwrite(jax.tree.map(jnp.copy, state)))
    compiled: list[str] = []

    def note(name: str, _: float, **kwargs: object) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(kwargs))

    store = CheckpointStore(tmp_path)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        store.save(1, state, Position(next_sample=0))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    overwrite(state)
    store.wait()
    assert compiled == []
    assert_equal(store.restore(1, abstract())[0], expected)
    store.close()


def test_the_newest_and_those_of_the_period_are_kept(tmp_path: pathlib.Path) -> None:
    store = CheckpointStore(tmp_path, keep_period=4)
    state = a_state()
    for step in (2, 4, 6, 8, 9):
        store.save(step, state, Position(next_sample=0))
    store.close()
    assert committed_steps(tmp_path) == [4, 8, 9]


@pytest.mark.parametrize(
    ("saved", "wanted", "message"),
    [
        (EMA, None, "saved with averaged weights"),
        (None, EMA, "saved without averaged weights: resume with --ema-decay None"),
    ],
)
def test_another_average_setting_is_explained(
    tmp_path: pathlib.Path, saved: float | None, wanted: float | None, message: str
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, a_state(saved), Position(next_sample=0))
    store.wait()
    with pytest.raises(UserError, match=message):
        store.restore(1, abstract(wanted))
    store.close()


def test_other_settings_are_named(tmp_path: pathlib.Path) -> None:
    store = CheckpointStore(tmp_path, settings={"freeze": "none", "ema_decay": EMA})
    store.save(1, a_state(), Position(next_sample=0))
    store.close()
    store = CheckpointStore(tmp_path, settings={"freeze": "vision", "ema_decay": EMA})
    with pytest.raises(UserError, match="other settings:\n    freeze: saved 'none', now 'vision'\n"):
        store.restore(1, abstract())
    store.close()


def test_another_freeze_optimizer_or_size_is_explained(tmp_path: pathlib.Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, a_state(), Position(next_sample=0))
    store.wait()
    with pytest.raises(UserError, match=r"It also has:\n    opt_state/1/0/mu/hidden/kernel/value"):
        store.restore(1, abstract(is_trainable=lambda path: "hidden" not in path))
    mesh = make_mesh(1, jax.devices()[:1])
    with pytest.raises(UserError, match=r"It lacks:\n    opt_state/0/trace/hidden/kernel/value"):
        store.restore(1, abstract_state(toy.init_params, optax.sgd(0.1, 0.9), toy.everything, EMA, mesh))
    wide = abstract_state(
        lambda rng: {"hidden": {"kernel": jnp.zeros((16, 65))}, "out": {"kernel": jnp.zeros((64, 4))}},
        *(toy.TX, toy.everything, EMA, mesh),
    )
    with pytest.raises(UserError, match="other sizes") as error:
        store.restore(1, wide)
    assert "params/hidden/kernel/value: saved (16, 64), now (16, 65)" in str(error.value)
    store.close()


def test_run_folder_rules(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "config" / "run"
    with pytest.raises(UserError, match="nothing to resume"):
        prepare_run_folder(run, resume=True, overwrite=False)
    assert prepare_run_folder(run, resume=False, overwrite=False) is None
    assert run.is_dir()
    store = CheckpointStore(run)
    store.save(3, a_state(), Position(next_sample=0))
    store.close()
    with pytest.raises(UserError, match=r"a run \(last checkpoint: 3\).*--resume.*--overwrite.*--exp-name"):
        prepare_run_folder(run, resume=False, overwrite=False)
    leftovers = [run / "9.orbax-checkpoint-tmp", run / "9.orbax-checkpoint-tmp-17"]
    for folder in leftovers:
        (folder / "params").mkdir(parents=True)
    assert committed_steps(run) == [3]
    assert prepare_run_folder(run, resume=True, overwrite=False) == 3
    assert not any(folder.exists() for folder in leftovers)
    with pytest.raises(UserError, match=r"Runs that can be resumed there: run\."):
        prepare_run_folder(tmp_path / "config" / "rum", resume=True, overwrite=False)
    assert prepare_run_folder(run, resume=False, overwrite=True) is None
    assert not list(run.iterdir())


def test_a_run_stopped_before_its_first_save_starts_again(tmp_path: pathlib.Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert prepare_run_folder(tmp_path, resume=True, overwrite=False) is None


def test_a_lost_process_is_not_told_as_a_full_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)

    def lost(*_: object, **__: object) -> None:
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")

    monkeypatch.setattr(store._manager, "save", lost)
    with pytest.raises(ValueError, match="closed by peer") as caught:  # which the guard explains
        store.save(3, a_state(), Position(next_sample=0))
    assert not isinstance(caught.value, UserError)


def test_what_went_wrong_is_told_without_asking_the_storage_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread asks, and the storage that has just failed may never answer."""
    store = CheckpointStore(tmp_path)
    store.save(3, a_state(), Position(next_sample=0))
    store.wait()
    store._failed(OSError(5, "Input/output error"))
    monkeypatch.setattr("openpi_accel.train.checkpoint.committed_steps", None)
    monkeypatch.setattr("openpi_accel.train.checkpoint.remove_leftovers", None)
    told = str(store.problem())
    assert "Input/output error" in told and f"checkpoint {tmp_path / '3'} is complete" in told
    store._failed(ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"))
    assert store.problem() is None  # the guard finds out who has gone
