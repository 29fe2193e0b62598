"""Which copy of an array is saved; eight CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from openpi_accel.parallel.mesh import FSDP_AXIS, make_mesh
from openpi_accel.train.tree_save import share_out


@pytest.mark.parametrize("fsdp_devices", [1, 2, 8])
def test_nothing_is_moved(fsdp_devices: int) -> None:
    mesh = make_mesh(fsdp_devices)
    specs = [PartitionSpec(FSDP_AXIS), PartitionSpec(), PartitionSpec(None, FSDP_AXIS)] * 3
    arrays = [
        jax.device_put(jnp.arange(64.0).reshape(8, 8) + i, jax.NamedSharding(mesh, s)) for i, s in enumerate(specs)
    ]
    firsts = set()
    for array, shared in zip(arrays, share_out(arrays), strict=True):
        np.testing.assert_array_equal(shared, array)
        assert shared.sharding.spec == array.sharding.spec
        where = {s.device: (s.index, s.data.unsafe_buffer_pointer()) for s in array.addressable_shards}
        assert {s.device: (s.index, s.data.unsafe_buffer_pointer()) for s in shared.addressable_shards} == where
        firsts |= {s.device for s in shared.addressable_shards if s.replica_id == 0}
    assert firsts == set(jax.devices())  # nine arrays, at most eight rows


def test_what_lies_on_no_mesh_stays_as_it_is() -> None:
    alone = jax.device_put(jnp.zeros(3), jax.devices()[5])
    assert share_out({"a": alone, "b": None}) == {"a": alone, "b": None}
