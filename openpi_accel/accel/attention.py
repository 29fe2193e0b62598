"""Attention that uses the mask's structure and keeps no probability matrix for the backward pass.

Shape letters: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from openpi_accel.models.attention import MASKED_LOGIT, siglip_attention
from openpi_accel.models.masks import AttentionMask

# The attention output, under the name by which accel/layers.py keeps it.
ENCODED = "encoded"
# (q B T N H, k B S K H, v B S K H, valid B S) -> B T N H
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
# Fewer queries than this go through plain products: a fused kernel is made for long rows.
_FEW_QUERIES = 64


def _blockwise(attend: Attend, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Each block's queries meet only the keys that the mask can open for them.

    An invalid query row sees the valid keys here, while the reference closes it and averages over all keys; nothing
    valid depends on either, and no gradient passes.
    """
    outs, stop_key = [], 0
    first_query = sum(mask.blocks) - mask.num_queries
    for length in mask.blocks:
        start_key, stop_key = stop_key, stop_key + length
        if stop_key <= first_query:  # cached: only its keys are here
            continue
        queries = q[:, start_key - first_query : stop_key - first_query]
        outs.append(attend(queries, k[:, :stop_key], v[:, :stop_key], mask.valid[:, :stop_key]))
    return checkpoint_name(jnp.concatenate(outs, axis=1), ENCODED)


def _attend_xla(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    """The reference's arithmetic, grouped query heads against their key head without copies of it."""
    b, t, n, h = q.shape
    num_kv = k.shape[2]
    q = (q * h**-0.5).reshape(b, t, num_kv, n // num_kv, h)
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
    logits = jnp.where(valid[:, None, None, None], logits, MASKED_LOGIT)
    probs = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", probs, v).reshape(b, t, n, h)


def _attend_cudnn(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    if q.shape[1] < _FEW_QUERIES:
        return _recomputed_xla(q, k, v, valid)
    return jax.nn.dot_product_attention(q, k, v, mask=valid[:, None, None], implementation="cudnn")


_recomputed_xla = jax.checkpoint(_attend_xla)
_recomputed_siglip = jax.checkpoint(siglip_attention)


def gemma_attention_xla(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Blockwise, the probabilities recomputed in the backward pass. Signature of models.attention.MaskedAttention."""
    return _blockwise(_recomputed_xla, q, k, v, mask)


def gemma_attention_cudnn(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Blockwise, long blocks by cuDNN's fused kernel; bfloat16 on an NVIDIA GPU only."""
    return _blockwise(_attend_cudnn, q, k, v, mask)


def siglip_attention_xla(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The reference, its probabilities recomputed in the backward pass."""
    return checkpoint_name(_recomputed_siglip(q, k, v), ENCODED)


def siglip_attention_cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """cuDNN's fused kernel, its softmax in float32 inside; bfloat16 on an NVIDIA GPU only."""
    return checkpoint_name(jax.nn.dot_product_attention(q, k, v, implementation="cudnn"), ENCODED)
