"""Collectives read from the text of compiled programs: of real ones on the CPU, and in the forms that GPUs have."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from openpi_accel.parallel.collectives import Collective, read_collectives
from openpi_accel.parallel.mesh import make_mesh

# As XLA writes for GPUs: asynchronous pairs, an operation wrapped in a computation, several merged into one.
GPU_TEXT = """HloModule step

%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %ag-start = ((bf16[4]{0}, bf16[2,2]{1,0}), (bf16[8]{0}, bf16[4,2]{1,0})) all-gather-start(%a, %b), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}
  %ag-done = (bf16[8]{0}, bf16[4,2]{1,0}) all-gather-done(%ag-start)
}

%cond (p: (s32[], f32[8,16])) -> pred[] {
}

%async_computation (param: f32[8]) -> f32[2] {
  ROOT %rs = f32[2]{0} reduce-scatter(%param), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}

%never_called (param: f32[8]) -> f32[8] {
  ROOT %ar = f32[8]{0} all-reduce(%param), channel_id=4, replica_groups={{0,1}}, to_apply=%add
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8,16]{1,0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"18"}}
  %rs-start = ((f32[8]{0}), f32[2]{0}) async-start(%a), calls=%async_computation
  %ar-start = (f32[8]{0}, /*index=1*/f32[]) all-reduce-start(%a, %s), channel_id=2, replica_groups=mesh['batch'=2,'fsdp'=4] {'batch','fsdp'}, to_apply=%add
  %ar-start.2 = ((f32[4]{0}), f32[4]{0}) all-reduce-start(%c), channel_id=6, replica_groups=mesh['batch'=2,'fsdp'=1] {'batch'}, to_apply=%add
  %move = pred[8]{0} collective-permute(%a), channel_id=5, source_target_pairs={{0,1},{1,0}}
}
"""  # noqa: E501


def test_the_forms_of_gpu_programs() -> None:
    gather, scatter, reduce, another, permute = read_collectives(GPU_TEXT)
    assert gather == Collective(
        kind="all-gather", results=(("bf16", (8,)), ("bf16", (4, 2))), group_size=2, in_loop=True, times=18
    )
    assert gather.result_bytes == 32 and gather.sent_bytes == 18 * 16
    assert scatter == Collective(kind="reduce-scatter", results=(("f32", (2,)),), group_size=4, in_loop=False, times=1)
    assert scatter.sent_bytes == 3 * 8
    assert (reduce.kind, reduce.group_size, reduce.result_bytes) == ("all-reduce", 8, 36)
    assert reduce.sent_bytes == 2 * 7 / 8 * 36
    assert (another.kind, another.group_size, another.result_bytes) == ("all-reduce", 2, 16)
    assert (permute.kind, permute.sent_bytes) == ("collective-permute", 8)


def test_a_real_program() -> None:
    assert jax.device_count() == 8
    mesh = make_mesh(4)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return x @ jax.lax.with_sharding_constraint(weight, everywhere), None

    def total(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    weights, x = jnp.ones((5, 16, 16)), jnp.ones((8, 16))
    by_sample = NamedSharding(mesh, PartitionSpec(("batch", "fsdp")))
    stacked = NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))
    compiled = jax.jit(total, in_shardings=(stacked, by_sample)).lower(weights, x).compile()
    gather, reduce = read_collectives(compiled.as_text() or "")
    assert (gather.kind, gather.in_loop, gather.times, gather.group_size) == ("all-gather", True, 5, 4)
    assert gather.result_bytes == 4 * 16 * 16
    assert (reduce.kind, reduce.in_loop, reduce.times, reduce.group_size) == ("all-reduce", False, 1, 8)


def test_unknown_devices_are_an_error() -> None:
    with pytest.raises(ValueError, match="which devices"):
        read_collectives("ENTRY %main (a: f32[8]) -> f32[8] {\n  %x = f32[8]{0} all-reduce(%a), replica_groups={}\n}")
