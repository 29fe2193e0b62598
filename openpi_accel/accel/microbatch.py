"""Gradients of a large batch from small ones: memory for a fraction of the samples, numbers of the whole.

Shape letters: B batch, N microbatches.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# value_and_grad(f)(params, batch, rng) -> (scalar, gradients in the shape of params)
ValueAndGrad = Callable[[Callable[..., jax.Array]], Callable[..., tuple[jax.Array, Any]]]
Draw = Callable[[Any, jax.Array], Any]


def accumulated(draw: Draw, num_microbatches: int) -> ValueAndGrad:
    """`jax.value_and_grad` by parts, summed in float32.

    What is random is drawn for the whole batch before it is split, so every sample meets the numbers that it meets in
    one large batch.

    Args:
        draw: (batch, rng) -> the deterministic rest, leaves with B first.
        num_microbatches: N, at least 2; divides B.

    Returns:
        A transformation of f(params, drawn, rng) -> scalar mean over samples.
    """

    def value_and_grad(f: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Any]]:
        def run(params: Any, batch: Any, rng: jax.Array) -> tuple[jax.Array, Any]:
            parts = jax.tree.map(lambda leaf: split_batch(leaf, num_microbatches), draw(batch, rng))
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)

            def add(sums: tuple[jax.Array, Any], part: Any) -> tuple[tuple[jax.Array, Any], None]:
                loss, grads = jax.value_and_grad(f)(params, part, rng)
                return (sums[0] + loss, jax.tree.map(lambda s, g: s + g.astype(jnp.float32), sums[1], grads)), None

            (loss, grads), _ = jax.lax.scan(add, (jnp.float32(0), zeros), parts)
            return loss / num_microbatches, jax.tree.map(
                lambda g, p: (g / num_microbatches).astype(p.dtype), grads, params
            )

        return run

    return value_and_grad


def split_batch(leaf: jax.Array, num: int) -> jax.Array:
    """B ... -> N B/N ...; every N-th sample, so that a batch split over devices stays spread over all of them."""
    return leaf.reshape(leaf.shape[0] // num, num, *leaf.shape[1:]).swapaxes(0, 1)
