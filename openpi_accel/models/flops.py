"""Model FLOPs of one training sample: the products that forward and backward need, without recomputation.

A product of M x K by K x N counts 2 M K N; its backward pass twice that. Attention counts its two products over the
pairs that the mask opens. Normalisations, softmax, embedding look-up, optimizer and augmentation do not count.

Shape letters: P prefix tokens, Q suffix tokens.
"""

import dataclasses

from openpi_accel.config.schema import Architecture, GemmaConfig

# Forward once, backward twice: one product for the input's gradient, one for the weight's.
FORWARD_AND_BACKWARD = 3


@dataclasses.dataclass(frozen=True)
class SampleFlops:
    """FLOPs per sample, forward and backward.

    Attributes:
        gemma: projections and MLPs of both experts, and the action and time projections.
        siglip: patches, projections, MLPs and head of the vision tower.
        attention: the two products of attention, of both towers.
    """

    gemma: float
    siglip: float
    attention: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.gemma + self.siglip + self.attention


def sample_flops(arch: Architecture, num_cameras: int, num_prompt_tokens: int) -> SampleFlops:
    """FLOPs of one sample as the model executes it.

    Every leaf counts as trained. All tokens count, also masked ones, because they are computed; a camera that is left
    out is not in `num_cameras`.

    Args:
        arch: sizes, with the action horizon.
        num_cameras: cameras that go through the vision tower.
        num_prompt_tokens: length of the padded prompt.
    """
    vision, width = arch.vision, arch.action_expert.width
    image_tokens = num_cameras * vision.num_tokens
    prefix = image_tokens + num_prompt_tokens
    suffix = arch.action_horizon + (0 if arch.pi05 else 1)

    gemma = prefix * _expert_weights(arch.paligemma) + suffix * _expert_weights(arch.action_expert)
    gemma += 2 * arch.action_horizon * arch.action_dim * width
    if arch.pi05:
        # Once per sample: the time MLP and the adaptive norms (two in each layer, one at the end).
        gemma += 2 * width**2 + (2 * arch.action_expert.depth + 1) * 3 * width**2
    else:
        gemma += arch.action_dim * width + arch.action_horizon * 3 * width**2

    block = 4 * vision.width**2 + 2 * vision.width * vision.mlp_dim
    patches = 3 * vision.patch_size**2 * vision.width
    siglip = image_tokens * (vision.depth * block + patches + vision.width * arch.paligemma.width)

    g = arch.paligemma
    pairs = prefix**2 + suffix * (prefix + suffix)
    attention = 2 * g.depth * g.num_heads * g.head_dim * pairs
    attention += 2 * vision.depth * vision.width * num_cameras * vision.num_tokens**2

    scale = 2.0 * FORWARD_AND_BACKWARD
    return SampleFlops(gemma=scale * gemma, siglip=scale * siglip, attention=scale * attention)


def _expert_weights(c: GemmaConfig) -> int:
    """Multiply-adds per token of one expert's layers (adapters included)."""
    heads, kv = c.num_heads * c.head_dim, 2 * c.num_kv_heads * c.head_dim
    per_layer = c.width * (2 * heads + kv) + 3 * c.width * c.mlp_dim
    if c.lora is not None:
        # q: a per head, b per head; key and value likewise; output: both factors summed over heads; three MLP pairs.
        r = c.lora.rank
        per_layer += r * (c.num_heads * c.width + heads) + 2 * r * (c.num_kv_heads * c.width) + r * kv
        per_layer += r * (heads + c.num_heads * c.width) + 3 * r * (c.width + c.mlp_dim)
    return c.depth * per_layer
