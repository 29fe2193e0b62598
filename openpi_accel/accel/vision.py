"""All cameras through the vision tower in one batch. B batch, C cameras, S image tokens, D width."""

import jax
import jax.numpy as jnp

from openpi_accel.models.ops import ImageEncoder


def encode_in_one_pass(encode: ImageEncoder, images: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """camera -> B H W 3 becomes camera -> B S D; one pass over the B C images, larger products, fewer kernels.

    The images of a sample stay together: with all of one camera first, a batch that is split over devices would be
    split anew, and images sent.
    """
    stacked = jnp.stack(list(images.values()), axis=1)
    encoded = encode(stacked.reshape(-1, *stacked.shape[2:]))
    by_sample = encoded.reshape(*stacked.shape[:2], *encoded.shape[1:])
    return {slot: by_sample[:, index] for index, slot in enumerate(images)}
