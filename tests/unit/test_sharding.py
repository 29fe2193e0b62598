"""Which axis is sharded: the whole table at full size, and the rules on small shapes."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from openpi_accel import tree
from openpi_accel.config.schema import GEMMA_VARIANTS, SIGLIP_VARIANTS
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.parallel.sharding import RULES, batch_sharding, state_shardings
from openpi_accel.train.start import abstract_state
from tests.unit import toy

# The stacked layer axis is 0 wherever there is one; the mesh axis fsdp lies on the axis given here, None: replicated.
GOLDEN_AXES_FSDP_4 = {
    "PaliGemma/img/Transformer/encoderblock/MlpBlock_0/Dense_0/kernel": 2,
    "PaliGemma/img/Transformer/encoderblock/MlpBlock_0/Dense_1/kernel": 1,
    "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0/key/kernel": 1,
    "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0/out/kernel": 3,
    "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel": 1,
    "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0/value/kernel": 1,
    "PaliGemma/img/head/kernel": 1,
    "PaliGemma/llm/embedder/input_embedding": 0,
    "PaliGemma/llm/final_norm_1/Dense_0/kernel": 1,
    "PaliGemma/llm/layers/attn/attn_vec_einsum/w": 3,
    "PaliGemma/llm/layers/attn/attn_vec_einsum_1/w": 3,
    "PaliGemma/llm/layers/attn/kv_einsum/w": 3,
    "PaliGemma/llm/layers/attn/kv_einsum_1/w": 3,
    "PaliGemma/llm/layers/attn/q_einsum/w": 2,
    "PaliGemma/llm/layers/attn/q_einsum_1/w": 2,
    "PaliGemma/llm/layers/mlp/gating_einsum": 3,
    "PaliGemma/llm/layers/mlp/linear": 1,
    "PaliGemma/llm/layers/mlp_1/gating_einsum": 3,
    "PaliGemma/llm/layers/mlp_1/linear": 1,
    "PaliGemma/llm/layers/pre_attention_norm_1/Dense_0/kernel": 2,
    "PaliGemma/llm/layers/pre_ffw_norm_1/Dense_0/kernel": 2,
    "time_mlp_in/kernel": 0,
    "time_mlp_out/kernel": 0,
}


def full_size_shapes(golden: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """Upstream's tree at full size: the tiny golden's, each tiny size replaced by the full one at its place."""
    llm, expert, vision = GEMMA_VARIANTS["gemma_2b"], GEMMA_VARIANTS["gemma_300m"], SIGLIP_VARIANTS["so400m"]
    depth, heads, head = llm.depth, llm.num_heads, llm.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    with np.load(golden) as file:
        names = [name.removeprefix("params/") for name in file.files if name.startswith("params/")]
        tiny = {name: file[f"params/{name}"].shape for name in names}
    vision_sizes = {2: vision.depth, 48: vision.width, 96: vision.mlp_dim, 3: vision.num_heads, 16: vision.width // 16}
    for name, shape in tiny.items():
        e = expert if "_1" in name.split("/llm/")[-1].replace("Dense_0", "") else llm
        if "/encoderblock/" in name or "/encoder_norm/" in name:
            shapes[name] = tuple(vision_sizes[size] for size in shape)
        elif name.endswith("img/embedding/kernel"):
            shapes[name] = (14, 14, 3, vision.width)
        elif name.endswith("img/pos_embedding"):
            shapes[name] = (1, vision.num_tokens, vision.width)
        elif name.endswith("img/head/kernel"):
            shapes[name] = (vision.width, llm.width)
        elif name.endswith("input_embedding"):
            shapes[name] = (257152, llm.width)
        elif "attn_vec_einsum" in name:
            shapes[name] = (depth, heads, head, e.width)
        elif "/kv_einsum" in name:
            shapes[name] = (depth, 2, 1, e.width, head)
        elif "/q_einsum" in name:
            shapes[name] = (depth, heads, e.width, head)
        elif name.endswith("gating_einsum"):
            shapes[name] = (depth, 2, e.width, e.mlp_dim)
        elif name.endswith("linear"):
            shapes[name] = (depth, e.mlp_dim, e.width)
        elif "norm_1/Dense_0/kernel" in name:
            shapes[name] = (depth,) * (len(shape) - 2) + (expert.width, 3 * expert.width)
        elif name.startswith("time_mlp") and name.endswith("kernel"):
            shapes[name] = (expert.width, expert.width)
        elif name.startswith("action_in_proj") and name.endswith("kernel"):
            shapes[name] = (32, expert.width)
        elif name.startswith("action_out_proj") and name.endswith("kernel"):
            shapes[name] = (expert.width, 32)
        else:  # biases and norm scales: all far below the size from which leaves are sharded
            shapes[name] = (*shape[:-1], 4304)
    return shapes


@pytest.mark.shared
def test_golden_specs_at_full_size(shared: pathlib.Path) -> None:
    assert jax.device_count() == 8
    shapes = full_size_shapes(shared / "goldens" / "pi05_tiny_fp32.npz")
    num_parameters = sum(np.prod(shape) for shape in shapes.values())
    assert 3.2e9 < num_parameters < 3.5e9
    abstract = tree.unflatten({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()})
    specs = {name: s.spec for name, s in tree.flatten(state_shardings(abstract, make_mesh(4))).items()}
    got = {name: list(spec).index("fsdp") for name, spec in specs.items() if "fsdp" in spec}
    assert got == GOLDEN_AXES_FSDP_4
    sharded = sum(np.prod(shapes[name]) for name in got)
    assert sharded / num_parameters > 0.999  # so the bytes per device fall as 1 / fsdp devices


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
