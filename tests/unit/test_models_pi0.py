"""Properties of the model that no golden states: cached sampling, elided cameras, masks by structure."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_accel.config.schema import Architecture, GemmaConfig, SiglipConfig
from openpi_accel.data.augment import augment, to_float
from openpi_accel.models.masks import AttentionMask, positions_of
from openpi_accel.models.pi0 import Pi0
from openpi_accel.models.pure import bind, init_params
from openpi_accel.objective import draw_noise_time, flow_matching_loss
from openpi_accel.types import Observation, Params

# 16 tokens per camera, so that these tests take no time.
PI05 = Architecture(
    pi05=True,
    paligemma=GemmaConfig(width=32, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8),
    action_expert=GemmaConfig(width=16, depth=2, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=8),
    vision=SiglipConfig(width=24, depth=2, mlp_dim=32, num_heads=2, patch_size=56),
    vocab_size=64,
    action_dim=32,
    action_horizon=5,
    dtype="float32",
)
PI0 = dataclasses.replace(PI05, pi05=False)
ARCHS = pytest.mark.parametrize("arch", [PI05, PI0], ids=["pi05", "pi0"])
BATCH, PROMPT = 3, 6
# What runs once is not worth the compiler's effort.
QUICK = {"xla_backend_optimization_level": 0}


def _params(arch: Architecture) -> Params:
    """Every leaf drawn on the host: fresh parameters have zero gates and norms, which would hide a fault."""
    rng = np.random.default_rng(7)
    shapes = jax.eval_shape(lambda: init_params(arch, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), jnp.float32), shapes)


@pytest.fixture(scope="module")
def obs() -> Observation:
    rng = np.random.default_rng(0)
    slots = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    images = {slot: jnp.asarray(rng.uniform(-1, 1, (BATCH, 224, 224, 3)), jnp.float32) for slot in slots}
    present = {"base_0_rgb": [True] * 3, "left_wrist_0_rgb": [True, False, True], "right_wrist_0_rgb": [False] * 3}
    return Observation(
        images=images,
        image_masks={slot: jnp.asarray(mask) for slot, mask in present.items()},
        state=jnp.asarray(rng.normal(size=(BATCH, 32)), jnp.float32),
        tokenized_prompt=jnp.asarray(rng.integers(0, 64, (BATCH, PROMPT)), jnp.int32),
        tokenized_prompt_mask=jnp.arange(PROMPT)[None] < jnp.asarray([[6], [3], [1]]),
    )


@ARCHS
def test_cached_sampling_equals_full_recomputation(arch: Architecture, obs: Observation) -> None:
    noise = jax.random.normal(jax.random.key(2), (BATCH, arch.action_horizon, 32))
    num_steps = 4

    def recompute(model: Pi0) -> jax.Array:
        x = noise
        for i in range(num_steps):
            x = x - model.velocity(obs, x, jnp.full((BATCH,), 1 - i / num_steps)) / num_steps
        return x

    params = _params(arch)
    cached = jax.jit(lambda p: bind(arch)(p).sample_actions(obs, noise, num_steps), compiler_options=QUICK)(params)
    np.testing.assert_allclose(
        cached, jax.jit(lambda p: recompute(bind(arch)(p)), compiler_options=QUICK)(params), rtol=0, atol=2e-5
    )
    assert float(jnp.max(jnp.abs(cached - noise))) > 0.1


@ARCHS
def test_always_masked_camera_may_be_left_out(arch: Architecture, obs: Observation) -> None:
    noise, time = draw_noise_time(jax.random.key(3), jax.random.key(4), (BATCH, arch.action_horizon, 32))
    actions = noise[::-1]

    def loss(o: Observation, params: Params) -> jax.Array:
        return jnp.mean(flow_matching_loss(bind(arch)(params), o, actions, noise, time))

    def without(*slots: str) -> Observation:
        return dataclasses.replace(
            obs,
            images={k: v for k, v in obs.images.items() if k not in slots},
            image_masks={k: v for k, v in obs.image_masks.items() if k not in slots},
        )

    params = _params(arch)
    value_and_grad = jax.jit(jax.value_and_grad(loss, argnums=1), compiler_options=QUICK)
    whole, grads = value_and_grad(obs, params)
    elided, elided_grads = value_and_grad(without("right_wrist_0_rgb"), params)
    np.testing.assert_allclose(whole, elided, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(elided_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(np.abs(a).max()) + 1e-7)
    # A camera that some sample has does matter; masked it is as good as left out, and needs no further program.
    masks = obs.image_masks | {"left_wrist_0_rgb": jnp.zeros(BATCH, bool)}
    blind, _ = value_and_grad(dataclasses.replace(obs, image_masks=masks), params)
    assert abs(float(blind - whole)) > 1e-4


def test_unknown_camera_is_refused(obs: Observation) -> None:
    wrong = dataclasses.replace(obs, images={"top": obs.images["base_0_rgb"]})
    with pytest.raises(ValueError, match="top"):
        jax.eval_shape(lambda p: bind(PI05)(p).embed_prefix(wrong), _params(PI05))


def test_mask_by_structure_equals_the_rules() -> None:
    valid = np.array([[True, False, True, True, True, True], [True, True, True, True, True, True]])
    blocks = (3, 1, 2)
    dense = np.asarray(AttentionMask(valid=jnp.asarray(valid), blocks=blocks, num_queries=6).dense())
    block_of = [0, 0, 0, 1, 2, 2]
    for b in range(2):
        for t in range(6):
            for s in range(6):
                assert dense[b, t, s] == (valid[b, t] and valid[b, s] and block_of[s] <= block_of[t])
    tail = AttentionMask(valid=jnp.asarray(valid), blocks=blocks, num_queries=3).dense()
    np.testing.assert_array_equal(tail, dense[:, 3:])
    np.testing.assert_array_equal(positions_of(jnp.asarray(valid))[0], [0, 0, 1, 2, 3, 4])


def test_augmentation_of_one_camera_moves_no_other() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    images = {slot: jnp.asarray(pixels) for slot in ("base_0_rgb", "left_wrist_0_rgb")}
    both = augment(jax.random.key(5), images)
    alone = augment(jax.random.key(5), {"left_wrist_0_rgb": images["left_wrist_0_rgb"]})
    np.testing.assert_array_equal(both["left_wrist_0_rgb"], alone["left_wrist_0_rgb"])
    from_float = augment(jax.random.key(5), to_float(images))
    np.testing.assert_array_equal(both["base_0_rgb"], from_float["base_0_rgb"])
    assert both["base_0_rgb"].dtype == jnp.float32 and not np.array_equal(both["base_0_rgb"], both["left_wrist_0_rgb"])
