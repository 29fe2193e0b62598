"""pi05_libero with the goldens' sizes, in float32: what tests of the step train."""

import dataclasses
from typing import Any

from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import ModelConfig, TrainConfig


def tiny_config(*, action_horizon: int = 10, **options: Any) -> TrainConfig:
    """`options` are fields of the config."""
    model = ModelConfig(
        paligemma_variant="tiny",
        action_expert_variant="tiny_expert",
        vision_variant="tiny",
        vocab_size=512,
        dtype="float32",
        action_horizon=action_horizon,
        max_token_len=8,
    )
    return dataclasses.replace(get_preset("pi05_libero"), model=model, **options)
