"""The pytrees that walk from the loader through the objective into the step.

Shape letters: B batch, H W image height and width, L prompt tokens, A action horizon, E action dim (32).
"""

import dataclasses
from typing import Any

import jax

# A parameter tree: nested dicts of arrays, keys exactly as in upstream's checkpoints (no trailing `value` key).
Params = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """What the model sees.

    Attributes:
        images: camera slot -> B H W 3; uint8 as it leaves the loader, float32 in [-1, 1] as the model takes it.
            Slots keep the order base_0_rgb, left_wrist_0_rgb, right_wrist_0_rgb; a slot may be left out.
        image_masks: camera slot -> B bool, False where the camera does not exist.
        state: B E float32, normalised and zero-padded.
        tokenized_prompt: B L int32, zero-padded.
        tokenized_prompt_mask: B L bool, True on real tokens.
    """

    images: dict[str, jax.Array]
    image_masks: dict[str, jax.Array]
    state: jax.Array
    tokenized_prompt: jax.Array
    tokenized_prompt_mask: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One training batch.

    Attributes:
        observation: what the model sees.
        actions: B A E float32, normalised and zero-padded.
        action_mask: B A E bool, False where the loss does not count; None where all of it counts.
    """

    observation: Observation
    actions: jax.Array
    action_mask: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything the step reads and writes.

    Attributes:
        step: scalar int32, the number of updates done.
        params: the full parameter tree; frozen leaves are bfloat16.
        opt_state: optax state over the trainable leaves.
        ema_params: exponential moving average of `params`, or None when EMA is off.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    ema_params: Params | None
