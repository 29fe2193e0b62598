"""The units of the model that an acceleration may replace. The defaults are upstream's arithmetic."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax

from openpi_accel.models.attention import MaskedAttention, PlainAttention, gemma_attention, siglip_attention
from openpi_accel.models.stack import RunLayers, ScanLayers

# B H W 3 float32 in [-1, 1] -> B tokens D
ImageEncoder = Callable[[jax.Array], jax.Array]
# (table V D, tokens B L int32) -> B L D, the tokens' rows
LookUp = Callable[[jax.Array, jax.Array], jax.Array]


class EncodeCameras(Protocol):
    """Takes every camera through the image encoder."""

    def __call__(self, encode: ImageEncoder, images: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """camera -> B H W 3 becomes camera -> B tokens D."""
        ...


def encode_one_by_one(encode: ImageEncoder, images: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """One pass of the vision tower per camera."""
    return {slot: encode(image) for slot, image in images.items()}


def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """The rows by indexing; the gradient adds them up."""
    return table[tokens]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ops:
    """Drop-in units; equal values compare equal, so that they may be part of a jit cache key.

    Attributes:
        gemma_attention, siglip_attention: see the protocols in attention.py.
        gemma_layers, siglip_layers: run the layer stacks, with each tower's recomputation policy.
        encode_cameras: takes the cameras through SigLIP.
        look_up: takes rows from the embedding table.
    """

    gemma_attention: MaskedAttention = gemma_attention
    siglip_attention: PlainAttention = siglip_attention
    gemma_layers: RunLayers = ScanLayers()
    siglip_layers: RunLayers = ScanLayers()
    encode_cameras: EncodeCameras = encode_one_by_one
    look_up: LookUp = look_up


REFERENCE_OPS = Ops()
