"""Sizes, initialisation and whole-step shapes of the full model, nothing computed at full size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import CAMERA_SLOTS, Architecture, ModelConfig
from openpi_accel.data.augment import augment
from openpi_accel.models.flops import sample_flops
from openpi_accel.models.freeze import trainable_predicate
from openpi_accel.models.pure import bind, init_params
from openpi_accel.objective import make_loss_fn
from openpi_accel.train.optimizer import make_optimizer, make_schedule
from openpi_accel.train.step import init_state, make_train_step
from openpi_accel.tree import flatten
from openpi_accel.types import Batch, Observation

# Random draws are slow to optimise and run once.
QUICK = {"xla_backend_optimization_level": 0}
FULL = get_preset("pi05_libero").model.architecture
TINY = ModelConfig(
    paligemma_variant="tiny", action_expert_variant="tiny_expert", vision_variant="tiny", vocab_size=512
).architecture


def _num_parameters(a: Architecture) -> int:
    """By hand, from the published sizes (pi0.5 without adapters)."""
    v, n = a.vision, a.paligemma.width
    block = 4 * (v.width**2 + v.width) + 2 * v.width * v.mlp_dim + v.mlp_dim + v.width + 4 * v.width
    siglip = v.depth * block + (3 * v.patch_size**2 + 1 + v.num_tokens + 2) * v.width + (v.width + 1) * n
    gemma = a.vocab_size * n + n
    for c in (a.paligemma, a.action_expert):
        attention = c.width * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        gemma += c.depth * (attention + 3 * c.width * c.mlp_dim)
    gemma += 2 * a.paligemma.depth * n
    d = a.action_expert.width
    gemma += (2 * a.action_expert.depth + 1) * 3 * (d**2 + d)
    heads = 2 * (d**2 + d) + a.action_dim * d + d + d * a.action_dim + a.action_dim
    return siglip + gemma + heads


def test_parameter_count() -> None:
    shapes = jax.eval_shape(lambda: init_params(FULL, jax.random.key(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == _num_parameters(FULL) == 3_353_433_872


def test_model_flops() -> None:
    """Against the compiler's own count of the forward pass, and the figures known for the full size."""
    flops = sample_flops(FULL, num_cameras=2, num_prompt_tokens=28)
    assert flops.total == pytest.approx(7.9e12, rel=0.01)
    assert flops.gemma == pytest.approx(6.4e12, rel=0.01) and flops.siglip == pytest.approx(1.3e12, rel=0.03)

    # The compiler counts the body of a loop once, so one layer each; the rest beyond the products is small here.
    arch = _one_layer(FULL)
    obs, actions = _inputs(arch, batch=2, cameras=CAMERA_SLOTS[:2], prompt=28, dtype=jnp.float32)
    params = jax.eval_shape(lambda: init_params(arch, jax.random.key(0)))
    lowered = jax.jit(lambda p, o, x: bind(arch)(p).velocity(o, x, jnp.ones(2))).lower(params, obs, actions)
    counted = lowered.cost_analysis()["flops"]
    assert 2 * sample_flops(arch, 2, 28).total / 3 == pytest.approx(counted, rel=0.02)


def _one_layer(arch: Architecture) -> Architecture:
    import dataclasses

    return dataclasses.replace(
        arch,
        **{
            name: dataclasses.replace(getattr(arch, name), depth=1) for name in ("paligemma", "action_expert", "vision")
        },
    )


def _inputs(
    arch: Architecture, batch: int, cameras: tuple[str, ...], prompt: int, dtype: jnp.dtype
) -> tuple[Observation, jax.ShapeDtypeStruct]:
    """Shapes of one batch."""
    shape = jax.ShapeDtypeStruct
    obs = Observation(
        images={slot: shape((batch, 224, 224, 3), dtype) for slot in cameras},
        image_masks={slot: shape((batch,), jnp.bool_) for slot in cameras},
        state=shape((batch, arch.action_dim), jnp.float32),
        tokenized_prompt=shape((batch, prompt), jnp.int32),
        tokenized_prompt_mask=shape((batch, prompt), jnp.bool_),
    )
    return obs, shape((batch, arch.action_horizon, arch.action_dim), jnp.float32)


@pytest.mark.parametrize("preset", ["pi05_libero", "pi0_libero"])
def test_full_size_step_keeps_its_shapes(preset: str) -> None:
    config = get_preset(preset)
    arch = config.model.architecture
    assert isinstance(config.model.max_token_len, int)
    obs, actions = _inputs(arch, 32, CAMERA_SLOTS, config.model.max_token_len, jnp.uint8)
    params = jax.eval_shape(lambda: init_params(arch, jax.random.key(0)))
    is_trainable = trainable_predicate(config.freeze, params, arch)
    schedule = make_schedule(config.lr_schedule)
    tx = make_optimizer(config.optimizer, schedule)
    state = jax.eval_shape(lambda p: init_state(p, tx, is_trainable, config.ema_decay), params)
    loss_fn = make_loss_fn(bind(arch), augment)
    step = make_train_step(loss_fn, tx, schedule, is_trainable, config.ema_decay)
    new, metrics = jax.eval_shape(step, state, Batch(observation=obs, actions=actions), jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert {x.shape for x in metrics.values()} == {()}


def test_initialisers() -> None:
    params = flatten(jax.jit(lambda: init_params(TINY, jax.random.key(3)), compiler_options=QUICK)())
    block, llm = "PaliGemma/img/Transformer/encoderblock", "PaliGemma/llm"

    def std(path: str) -> float:
        return float(np.std(params[path]))

    close = {"rel": 0.1}
    assert std(f"{llm}/embedder/input_embedding") == pytest.approx(0.01, **close)
    assert std("PaliGemma/img/pos_embedding") == pytest.approx(48**-0.5, **close)
    assert std("PaliGemma/img/embedding/kernel") == pytest.approx((14 * 14 * 3) ** -0.5, **close)
    # Fan-in is the contracted axes: D for q, N H for the output.
    assert std(f"{llm}/layers/attn/q_einsum/w") == pytest.approx(64**-0.5, **close)
    assert std(f"{llm}/layers/attn/kv_einsum/w") == pytest.approx(64**-0.5, **close)
    assert std(f"{llm}/layers/attn/attn_vec_einsum/w") == pytest.approx((4 * 16) ** -0.5, **close)
    assert std(f"{llm}/layers/mlp/gating_einsum") == pytest.approx(64**-0.5, **close)
    assert std(f"{llm}/layers/mlp/linear") == pytest.approx(128**-0.5, **close)
    # Xavier: variance 2 / (fan-in + fan-out), heads counted together.
    for name in ("query/kernel", "out/kernel"):
        assert std(f"{block}/MultiHeadDotProductAttention_0/{name}") == pytest.approx((2 / 96) ** 0.5, **close)
    assert std(f"{block}/MlpBlock_0/Dense_0/kernel") == pytest.approx((2 / 144) ** 0.5, **close)
    assert 0 < std(f"{block}/MlpBlock_0/Dense_0/bias") < 2e-6
    for path in ("PaliGemma/img/head/kernel", f"{llm}/final_norm/scale", f"{llm}/layers/pre_ffw_norm_1/Dense_0/kernel"):
        assert not np.any(params[path])
    assert np.all(params["PaliGemma/img/Transformer/encoder_norm/scale"] == 1)
    layers = params[f"{llm}/layers/attn/q_einsum/w"]
    assert np.abs(layers[0] - layers[1]).max() > 0.1  # every layer is drawn from its own key


def test_bind_refuses_a_foreign_tree() -> None:
    shapes = jax.eval_shape(lambda: init_params(TINY, jax.random.key(0)))
    del shapes["time_mlp_in"]["bias"]
    with pytest.raises(ValueError, match="time_mlp_in/bias"):
        bind(TINY)(shapes)
