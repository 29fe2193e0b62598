"""What is made for saves, against the shards of real arrays; eight CPU devices."""

import collections
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from openpi_accel.parallel.mesh import BATCH_AXIS, FSDP_AXIS, make_mesh
from openpi_accel.train.checkpoint_tree import to_items
from openpi_accel.train.host_memory import made_for_saves, pieces
from openpi_accel.train.tree_save import share_out
from openpi_accel.types import TrainState


def state_on(mesh: jax.sharding.Mesh) -> TrainState:
    """One array split over the fsdp axis, one whole on every device."""

    def put(shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
        return jax.device_put(jnp.zeros(shape, jnp.float32), jax.NamedSharding(mesh, spec))

    params = {"split": {"kernel": put((64, 8), PartitionSpec(FSDP_AXIS))}, "whole": put((40,), PartitionSpec())}
    return TrainState(step=put((), PartitionSpec()), params=params, opt_state=(), ema_params=params)


def shapes(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.mark.parametrize("fsdp_devices", [1, 4, 8])
def test_one_process_sends_one_copy_of_everything(fsdp_devices: int) -> None:
    mesh = make_mesh(fsdp_devices)
    assert mesh.size == 8 and mesh.shape[BATCH_AXIS] == 8 // fsdp_devices
    state = state_on(mesh)
    saved = jax.tree.leaves(share_out(to_items(state)))
    sent = [s for leaf in saved for s in leaf.addressable_shards if s.replica_id == 0]
    expected = collections.Counter((shard.device, shard.data.nbytes) for shard in sent)
    assert collections.Counter(pieces(shapes(state))) == expected
    assert sum(size for _, size in pieces(shapes(state))) == sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("fsdp_devices", [1, 4])
def test_all_devices_send(fsdp_devices: int) -> None:
    mesh = make_mesh(fsdp_devices)
    everywhere = jax.NamedSharding(mesh, PartitionSpec(None, FSDP_AXIS))
    params = {str(i): jax.ShapeDtypeStruct((5, 16), jnp.float32, sharding=everywhere) for i in range(16)}
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=jax.NamedSharding(mesh, PartitionSpec()))
    sent = collections.Counter[jax.Device]()
    for device, size in pieces(TrainState(step=step, params=params, opt_state=(), ema_params=None)):
        sent[device] += size
    assert len(sent) == 8 and max(sent.values()) - min(sent.values()) <= 4


def test_it_is_made_beside_the_work_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    abstract, device_put = shapes(state_on(make_mesh(8))), jax.device_put
    made: list[tuple[int, str | None]] = []
    two, go_on, all_made = threading.Event(), threading.Event(), threading.Event()

    def watched(value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        made.append((value.nbytes, sharding.memory_kind))
        if len(made) == 2:
            two.set()
            assert go_on.wait(60)
        if len(made) == 2 + len(pieces(abstract)):
            all_made.set()
        return device_put(value, sharding)

    monkeypatch.setattr(jax, "device_put", watched)
    with made_for_saves(abstract):
        assert not made  # nothing is pinned for the CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with made_for_saves(abstract):
        assert two.wait(60)
        threading.Timer(0.2, go_on.set).start()
    assert made == [(size, "pinned_host") for _, size in pieces(abstract)[:2]]  # leaving stopped it
    with made_for_saves(abstract):
        assert all_made.wait(60)
    assert [size for size, _ in made[2:]] == [size for _, size in pieces(abstract)]


def test_no_room_is_left_to_the_save_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    abstract, tried = shapes(state_on(make_mesh(8))), threading.Event()

    def full(*_: Any) -> jax.Array:
        tried.set()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_put", full)
    with made_for_saves(abstract):
        assert tried.wait(60)
