"""A fused attention kernel of which only the shapes are known: cuDNN's, traced where there is no GPU.

Shape letters: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from openpi_accel.accel.attention import CUDNN_FORWARD, gemma_attention_cudnn, siglip_attention_cudnn

# Recomputation policies know the kernel by this name.
_FORWARD = Primitive(CUDNN_FORWARD)
_BACKWARD = Primitive("dot_product_attention_bwd_wrapper")
KERNELS = frozenset({_FORWARD.name, _BACKWARD.name})
_FORWARD.multiple_results = _BACKWARD.multiple_results = True


@_FORWARD.def_abstract_eval
def _forward_shapes(q: jax.core.ShapedArray, *_: jax.core.ShapedArray) -> list[jax.core.ShapedArray]:
    """q: B T N H -> the result, and a number per row for the backward pass (B N T)."""
    b, t, n, _h = q.shape
    return [q, q.update(shape=(b, n, t), dtype=jnp.dtype("float32"))]


@_BACKWARD.def_abstract_eval
def _backward_shapes(
    q: jax.core.ShapedArray, k: jax.core.ShapedArray, v: jax.core.ShapedArray, *_: jax.core.ShapedArray
) -> list[jax.core.ShapedArray]:
    return [q, k, v]


@jax.custom_vjp
def _kernel(q: jax.Array, k: jax.Array, v: jax.Array, num_keys: jax.Array | None) -> jax.Array:
    """q: B T N H; k, v: B S K H; num_keys: B -> B T N H."""
    return _forward(q, k, v, num_keys)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, num_keys: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, rows = _FORWARD.bind(q, k, v)
    return out, (q, k, v, out, rows)


def _backward(residuals: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array | None, ...]:
    return (*_BACKWARD.bind(*residuals, grad), None)


_kernel.defvjp(_forward, _backward)
gemma_attention = functools.partial(gemma_attention_cudnn, kernel=_kernel)
siglip_attention = functools.partial(siglip_attention_cudnn, kernel=_kernel)
