"""Which attention kernel is faster here: measured once at the run's own shapes, never guessed.

Shape letters: B batch, T tokens, N query heads, K key/value heads, H head dim.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from openpi_accel.accel import attention
from openpi_accel.models.masks import AttentionMask

_NUM_REPEATS, _NUM_CALLS = 3, 5
Attention = Callable[..., Any]
GEMMA: Mapping[str, Attention] = {"xla": attention.gemma_attention_xla, "cudnn": attention.gemma_attention_cudnn}
SIGLIP: Mapping[str, Attention] = {"xla": attention.siglip_attention_xla, "cudnn": attention.siglip_attention_cudnn}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShapes:
    """One device's share of a batch.

    Attributes:
        batch, images: samples, and images that go through the vision tower together.
        blocks: lengths of Gemma's attention blocks.
        gemma: N, K, H. siglip: T, N, H.
    """

    batch: int
    images: int
    blocks: tuple[int, ...]
    gemma: tuple[int, int, int]
    siglip: tuple[int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The faster implementation per tower, and forward plus backward of one layer in milliseconds by name (empty where
    there was nothing to choose)."""

    gemma: str
    siglip: str
    gemma_ms: Mapping[str, float]
    siglip_ms: Mapping[str, float]

    def __str__(self) -> str:
        if not self.gemma_ms:
            return f"OPENPI_FLASH_IMPL=auto took {self.gemma}, the only one that runs here in this dtype"

        def times(ms: Mapping[str, float]) -> str:
            return ", ".join(f"{name} {value:.2f} ms" for name, value in ms.items())

        return (
            f"OPENPI_FLASH_IMPL=auto measured one layer, forward and backward: Gemma {times(self.gemma_ms)} -> "
            f"{self.gemma}; SigLIP {times(self.siglip_ms)} -> {self.siglip}"
        )


def cudnn_serves(dtype: str) -> bool:
    """Whether cuDNN's fused attention can run here."""
    return jax.default_backend() == "gpu" and dtype == "bfloat16"


def fastest(shapes: AttentionShapes, dtype: str) -> Choice:
    """Times both implementations where both can run; the same answer on all processes (the first one's)."""
    if not cudnn_serves(dtype):
        return Choice(gemma="xla", siglip="xla", gemma_ms={}, siglip_ms={})
    names = ("xla", "cudnn")
    keys = jax.random.split(jax.random.key(0), 6)
    n, k, h = shapes.gemma
    t = sum(shapes.blocks)
    mask = AttentionMask(valid=jnp.ones((shapes.batch, t), bool), blocks=shapes.blocks, num_queries=t)
    gemma = [_normal(key, (shapes.batch, t, heads, h), dtype) for key, heads in zip(keys, (n, k, k), strict=False)]
    siglip_shape = (shapes.images, *shapes.siglip)
    siglip = [_normal(key, siglip_shape, dtype) for key in keys[3:]]
    gemma_ms = {name: _layer_ms(GEMMA[name], gemma, mask) for name in names}
    siglip_ms = {name: _layer_ms(SIGLIP[name], siglip) for name in names}
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        times = np.asarray([*gemma_ms.values(), *siglip_ms.values()])
        shared = [float(value) for value in multihost_utils.broadcast_one_to_all(times)]
        gemma_ms = dict(zip(names, shared[: len(names)], strict=True))
        siglip_ms = dict(zip(names, shared[len(names) :], strict=True))
    return Choice(
        gemma=min(gemma_ms, key=gemma_ms.__getitem__),
        siglip=min(siglip_ms, key=siglip_ms.__getitem__),
        gemma_ms=gemma_ms,
        siglip_ms=siglip_ms,
    )


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, jnp.dtype(dtype))


def _layer_ms(attend: Attention, qkv: list[jax.Array], *rest: Any) -> float:
    """Forward and backward of one layer: the best of a few runs of several calls."""

    def loss(qkv: list[jax.Array]) -> jax.Array:
        outs = jax.tree.leaves(attend(*qkv, *rest))
        return jnp.sum(jnp.stack([jnp.sum(jnp.square(out.astype(jnp.float32))) for out in outs]))

    grad = jax.jit(jax.grad(loss))
    jax.block_until_ready(grad(qkv))
    times = []
    for _ in range(_NUM_REPEATS):
        start = time.perf_counter()
        for _ in range(_NUM_CALLS):
            out = grad(qkv)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / _NUM_CALLS * 1e3)
    return min(times)
