"""Attention that uses the mask's structure and keeps no probability matrix for the backward pass.

Shape letters: B batch, T query tokens, S key tokens, N query heads, K key/value heads, G query heads per key/value
head, H head dim, R rows (T times G).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from openpi_accel.models.attention import MASKED_LOGIT, siglip_attention
from openpi_accel.models.masks import AttentionMask

# What an attention takes and gives, under the name by which accel/layers.py keeps it for the backward pass.
ATTENTION = "attention"
# JAX's name of cuDNN's forward kernel; its outputs are the result and one number per row for the backward kernel.
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
# (q B T N H, k B S K H, v B S K H, valid B S) -> B T N H
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
# (q, k, v, number of keys per sample or None for all) -> as q; a fused kernel
FusedKernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
# Fewer queries than this go through plain products: a fused kernel is made for long rows.
_FEW_QUERIES = 64


def _blockwise(attend: Attend, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> tuple[jax.Array, ...]:
    """Each block's queries meet only the keys that the mask can open for them. One result per block, so that a block
    that feeds nothing (the last layer's prefix) is dead code.

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
        keep = functools.partial(checkpoint_name, name=ATTENTION)
        outs.append(attend(keep(queries), keep(k[:, :stop_key]), keep(v[:, :stop_key]), mask.valid[:, :stop_key]))
    return tuple(outs)


@jax.custom_vjp
def _attend_xla(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    """Plain batched products. All query heads of one key head are rows of one product, so nothing is copied per head;
    logits and softmax in float32, as the reference has them."""
    return _attend_fwd(q, k, v, valid)[0]


def _attend_fwd(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    rows, keys, values = _rows(q, k.shape[2]), _heads_first(k), _heads_first(v)
    out = _tokens(jnp.einsum("BKRS,BKSH->BKRH", _probs(rows, keys, valid), values), q.shape[1])
    return out, (q, k, v, valid, checkpoint_name(out, ATTENTION))


def _attend_bwd(residuals: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array | None, ...]:
    """Recomputes the probabilities P; dS = P (dP - rowsum(dO O)) as in FlashAttention (Dao et al. 2022, eq. 4)."""
    # The barrier keeps the compiler from finding P in the forward pass and holding on to it.
    q, k, v, valid, out = jax.lax.optimization_barrier(residuals)
    num_kv, t = k.shape[2], q.shape[1]
    rows, keys, values = _rows(q, num_kv), _heads_first(k), _heads_first(v)
    grads = _rows(grad, num_kv, scaled=False)
    probs = _probs(rows, keys, valid)
    grad_values = jnp.einsum("BKRS,BKRH->BKSH", probs, grads)
    grad_probs = jnp.einsum("BKRH,BKSH->BKRS", grads, values).astype(jnp.float32)
    means = jnp.sum(grads.astype(jnp.float32) * _rows(out, num_kv, scaled=False), axis=-1, keepdims=True)
    grad_logits = (probs * (grad_probs - means)).astype(q.dtype)
    grad_rows = jnp.einsum("BKRS,BKSH->BKRH", grad_logits, keys) * q.shape[-1] ** -0.5
    grad_keys = jnp.einsum("BKRS,BKRH->BKSH", grad_logits, rows)
    return _tokens(grad_rows, t), _heads_first(grad_keys), _heads_first(grad_values), None


_attend_xla.defvjp(_attend_fwd, _attend_bwd)


def _rows(x: jax.Array, num_kv: int, scaled: bool = True) -> jax.Array:
    """B T N H -> B K R H, times H^-0.5."""
    b, t, n, h = x.shape
    x = x * h**-0.5 if scaled else x
    return x.reshape(b, t, num_kv, n // num_kv, h).swapaxes(1, 2).reshape(b, num_kv, t * n // num_kv, h)


def _tokens(x: jax.Array, t: int) -> jax.Array:
    """B K R H -> B T N H."""
    b, num_kv, r, h = x.shape
    return x.reshape(b, num_kv, t, r // t, h).swapaxes(1, 2).reshape(b, t, num_kv * r // t, h)


def _heads_first(x: jax.Array) -> jax.Array:
    """B S K H <-> B K S H."""
    return x.swapaxes(1, 2)


def _probs(rows: jax.Array, keys: jax.Array, valid: jax.Array) -> jax.Array:
    """rows: B K R H, keys: B K S H, valid: B S -> B K R S in the rows' dtype."""
    logits = jnp.einsum("BKRH,BKSH->BKRS", rows, keys, preferred_element_type=jnp.float32)
    return jax.nn.softmax(jnp.where(valid[:, None, None], logits, MASKED_LOGIT), axis=-1).astype(rows.dtype)


def cudnn_kernel(q: jax.Array, k: jax.Array, v: jax.Array, num_keys: jax.Array | None) -> jax.Array:
    """cuDNN's fused kernel; bfloat16 on an NVIDIA GPU only."""
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=num_keys, implementation="cudnn")


def _attend_fused(kernel: FusedKernel, q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    """A fused kernel. cuDNN's is fast with a number of keys per sample, not with a mask, so the valid keys come first;
    their order does not matter, for positions have been rotated into them."""
    if q.shape[1] < _FEW_QUERIES:
        return _attend_xla(q, k, v, valid)
    order = jnp.argsort(~valid, axis=1, stable=True)
    num_keys = jnp.maximum(jnp.sum(valid, axis=1, dtype=jnp.int32), 1)
    return kernel(q, _reordered(k, order, valid), _reordered(v, order, valid), num_keys)


@jax.custom_vjp
def _reordered(x: jax.Array, order: jax.Array, valid: jax.Array) -> jax.Array:
    """x: B S K H, order: B S, a permutation of each row -> B S K H. The gradient is a gather too, and 0 where `valid`
    (before the permutation) is False, whatever the kernel wrote there."""
    return jnp.take_along_axis(x, order[:, :, None, None], axis=1)


def _reordered_fwd(x: jax.Array, order: jax.Array, valid: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _reordered(x, order, valid), (order, valid)


def _reordered_bwd(residuals: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, None, None]:
    order, valid = residuals
    back = jnp.argsort(order, axis=1)
    grad = jnp.take_along_axis(grad, back[:, :, None, None], axis=1)
    return jnp.where(valid[:, :, None, None], grad, 0), None, None


_reordered.defvjp(_reordered_fwd, _reordered_bwd)
_recomputed_siglip = jax.checkpoint(siglip_attention)


def gemma_attention_xla(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> tuple[jax.Array, ...]:
    """Blockwise, the probabilities recomputed in the backward pass. Signature of models.attention.MaskedAttention."""
    return _blockwise(_attend_xla, q, k, v, mask)


def gemma_attention_cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, kernel: FusedKernel = cudnn_kernel
) -> tuple[jax.Array, ...]:
    """Blockwise, long blocks by the fused kernel (cuDNN's: bfloat16 on an NVIDIA GPU only)."""
    return _blockwise(functools.partial(_attend_fused, kernel), q, k, v, mask)


def siglip_attention_xla(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The reference, its probabilities recomputed in the backward pass."""
    return checkpoint_name(_recomputed_siglip(q, k, v), ATTENTION)


def siglip_attention_cudnn(q: jax.Array, k: jax.Array, v: jax.Array, kernel: FusedKernel = cudnn_kernel) -> jax.Array:
    """The fused kernel, its softmax in float32 inside (cuDNN's: bfloat16 on an NVIDIA GPU only)."""
    return kernel(q, k, v, None)
