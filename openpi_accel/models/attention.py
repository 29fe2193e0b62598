"""Reference attention functions: the full probability matrix, in upstream's order of rounding.

Shape letters: B batch, T query tokens, S key tokens, N query heads, K key/value heads, G query heads per key/value
head, H head dim.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from openpi_accel.models.masks import AttentionMask

# Finite, so that a row without any open key attends uniformly to all keys instead of giving NaN (as upstream does).
MASKED_LOGIT = -2.3819763e38


class MaskedAttention(Protocol):
    """Grouped-query attention under a mask; scales q by H^-0.5 itself."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask
    ) -> jax.Array | tuple[jax.Array, ...]:
        """q: B T N H; k, v: B S K H -> B T N H, all in the compute dtype; or its parts by the mask's blocks."""
        ...


def split_tokens(x: jax.Array | tuple[jax.Array, ...], lengths: list[int]) -> list[jax.Array]:
    """An attention's result (B T N H, or parts of it along T) in pieces of these lengths."""
    if isinstance(x, tuple):
        if [part.shape[1] for part in x] == lengths:
            return list(x)
        x = jnp.concatenate(x, axis=1)
    stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [x[:, stop - length : stop] for length, stop in zip(lengths, stops, strict=True)]


class PlainAttention(Protocol):
    """Unmasked attention; scales q by H^-0.5 itself."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """q: B T N H; k, v: B S N H -> B T N H, all in the compute dtype."""
        ...


def gemma_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Logits and softmax in float32, probabilities cast to the compute dtype before they meet v."""
    b, t, n, h = q.shape
    num_kv = k.shape[2]
    q = (q * h**-0.5).reshape(b, t, num_kv, n // num_kv, h)
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
    logits = jnp.where(mask.dense()[:, None, None], logits, MASKED_LOGIT)
    probs = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", probs, v).reshape(b, t, n, h)


def siglip_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """q is divided by sqrt(H) first; logits and softmax stay in the compute dtype."""
    q = q / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    probs = jax.nn.softmax(jnp.einsum("BTNH,BSNH->BNTS", q, k), axis=-1)
    return jnp.einsum("BNTS,BSNH->BTNH", probs.astype(v.dtype), v)
