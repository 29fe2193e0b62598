"""All cameras through the vision tower in one batch. B batch, C cameras, S image tokens, D width."""

import jax
import jax.numpy as jnp

from openpi_accel.models.ops import ImageEncoder


def encode_in_one_pass(encode: ImageEncoder, images: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """camera -> B H W 3 becomes camera -> B S D; one pass over the B C images, larger products, fewer kernels."""
    encoded = encode(jnp.concatenate(list(images.values())))
    return dict(zip(images, jnp.split(encoded, len(images)), strict=True))
