"""Which axis is sharded: every leaf at full size, and the rules on small shapes."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from openpi_accel import tree
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.parallel.sharding import RULES, batch_sharding, state_shardings
from openpi_accel.train.start import abstract_state
from tests import golden_specs
from tests.unit import toy

STACKED = ("PaliGemma/llm/layers/", "PaliGemma/img/Transformer/encoderblock/")


def device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


@pytest.mark.parametrize(("layout", "fsdp"), golden_specs.LAYOUTS.items())
def test_golden_specs_at_full_size(layout: str, fsdp: int) -> None:
    """A difference that is meant: python -m tests.golden_specs"""
    assert jax.device_count() == 8
    golden = json.loads(golden_specs.FILE.read_text())[layout]
    state = golden_specs.abstract_state(fsdp)
    adam = state.opt_state[1][0]
    for part in (state.params, state.ema_params, adam.mu, adam.nu):
        assert golden_specs.specs_of(part) == golden
    assert all(spec[0] is None for path, spec in golden.items() if path.startswith(STACKED) and spec)
    params = tree.flatten(state.params)
    num_parameters = sum(math.prod(leaf.shape) for leaf in params.values())
    assert 3.3e9 < num_parameters < 3.4e9
    small = sum(math.prod(params[path].shape) for path, spec in golden.items() if not spec)
    assert small / num_parameters < 0.001  # so the bytes per device fall as 1 / fsdp devices
    leaves = jax.tree.leaves(state)
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    assert sum(map(device_bytes, leaves)) == pytest.approx(whole / fsdp, rel=0.01)


@pytest.mark.parametrize("rule", [pattern for pattern, axes in RULES if getattr(axes, "skip", 0)])
def test_the_layer_axis_is_never_sharded(rule: str) -> None:
    shapes = {"a" + rule + "w": jax.ShapeDtypeStruct((64, 8, 8), jnp.float32)}
    (sharding,) = state_shardings(shapes, make_mesh(8), min_num_elements=1).values()
    assert sharding.spec == PartitionSpec(None, "fsdp")


def test_rules_on_small_shapes() -> None:
    def spec(shape: tuple[int, ...], fsdp: int = 8, minimum: int = 1) -> PartitionSpec:
        shapes = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
        return state_shardings(shapes, make_mesh(fsdp), min_num_elements=minimum)["w"].spec

    assert spec((8, 16)) == PartitionSpec(None, "fsdp")
    assert spec((16, 16)) == PartitionSpec("fsdp")
    assert spec((24, 100)) == PartitionSpec("fsdp")  # 100 is larger, but 8 does not divide it
    assert spec((7, 9)) == PartitionSpec()
    assert spec((16, 16), minimum=257) == PartitionSpec()
    assert spec((16, 16), fsdp=1) == PartitionSpec()
    assert spec(()) == PartitionSpec()


def test_an_explicit_rule_wins_over_those_below_it() -> None:
    rules = ((r"/w$", PartitionSpec(None, None, "fsdp")), *RULES)
    shapes = {"w": jax.ShapeDtypeStruct((8, 8, 8), jnp.float32), "v": jax.ShapeDtypeStruct((8, 8, 8), jnp.float32)}
    got = state_shardings(shapes, make_mesh(8), rules, min_num_elements=1)
    assert (got["w"].spec, got["v"].spec) == (PartitionSpec(None, None, "fsdp"), PartitionSpec("fsdp"))


def test_optimizer_state_and_average_follow_their_parameter() -> None:
    mesh = make_mesh(8)
    abstract = abstract_state(toy.init_params, toy.TX, toy.everything, 0.9, mesh)
    shardings = state_shardings(abstract, mesh, min_num_elements=1)
    kernel = PartitionSpec(None, "fsdp")
    adam = shardings.opt_state[1][0]
    for part in (shardings.params, shardings.ema_params, adam.mu, adam.nu):
        assert part["hidden"]["kernel"].spec == kernel
    assert shardings.step.spec == PartitionSpec()


def test_a_batch_is_split_over_all_devices() -> None:
    array = jax.device_put(np.arange(16.0).reshape(16, 1), batch_sharding(make_mesh(4)))
    assert sorted(float(shard.data[0, 0]) for shard in array.addressable_shards) == [0, 2, 4, 6, 8, 10, 12, 14]
