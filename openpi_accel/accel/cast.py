"""Weights cast to the compute dtype once per step, before the layers slice them."""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from openpi_accel import tree
from openpi_accel.types import Params

# Leaves that the model itself casts to the compute dtype before use. Norm scales, the embedding table, patches,
# positions and the action head are used in float32 and stay so.
_CAST = re.compile(
    r"PaliGemma/llm/layers/(attn|mlp|mlp_1)/"
    r"|PaliGemma/llm/.*norm_1/Dense_0/"
    r"|PaliGemma/img/Transformer/encoderblock/(MultiHeadDotProductAttention_0|MlpBlock_0)/"
    r"|PaliGemma/img/head/"
)


def cast_weights_early(bind: Callable[[Params], Any], dtype: str) -> Callable[[Params], Any]:
    """`bind` on weights that are cast beforehand: the same values, half the bytes sliced, gradients stacked in the
    compute dtype they were computed in."""

    def bind_cast(params: Params) -> Any:
        flat = tree.flatten(params)
        cast = {path: leaf.astype(jnp.dtype(dtype)) if _CAST.search(path) else leaf for path, leaf in flat.items()}
        return bind(tree.unflatten(cast))

    return bind_cast
