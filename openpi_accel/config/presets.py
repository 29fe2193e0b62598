"""The named configs. Sizes and schedules of pi05_libero and pi0_libero are upstream's (openpi 15a9616)."""

import difflib

from openpi_accel.config.schema import (
    LOCAL_REPO_ID,
    CameraKeys,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    WeightLoaderConfig,
)
from openpi_accel.errors import UserError

_PI05_BASE = WeightLoaderConfig(params_path="gs://openpi-assets/checkpoints/pi05_base/params")
_PI0_BASE = WeightLoaderConfig(params_path="gs://openpi-assets/checkpoints/pi0_base/params")
_LIBERO_CAMERAS = CameraKeys(base_0_rgb="image", left_wrist_0_rgb="wrist_image")

PRESETS = {
    preset.name: preset
    for preset in (
        TrainConfig(
            name="pi05_libero",
            model=ModelConfig(action_horizon=10, max_token_len=200, discrete_state_input=False),
            data=DataConfig(
                repo_id="physical-intelligence/libero", cameras=_LIBERO_CAMERAS, state_key="state", action_key="actions"
            ),
            weight_loader=_PI05_BASE,
            lr_schedule=ScheduleConfig(warmup_steps=10_000, peak_lr=5e-5, decay_steps=1_000_000, decay_lr=5e-5),
            ema_decay=0.999,
            batch_size=256,
        ),
        TrainConfig(
            name="pi0_libero",
            model=ModelConfig(pi05=False, action_horizon=50, max_token_len=48, discrete_state_input=False),
            data=DataConfig(
                repo_id="physical-intelligence/libero",
                cameras=_LIBERO_CAMERAS,
                state_key="state",
                action_key="actions",
                delta_action_dims=6,
                normalization="zscore",
            ),
            weight_loader=_PI0_BASE,
        ),
        TrainConfig(
            name="pi05_lerobot",
            model=ModelConfig(action_horizon=10, max_token_len="auto"),
            data=DataConfig(repo_id=LOCAL_REPO_ID),
            weight_loader=_PI05_BASE,
            lr_schedule=ScheduleConfig(warmup_steps=1_000, peak_lr=5e-5, decay_steps=30_000, decay_lr=5e-6),
            ema_decay=0.999,
        ),
        TrainConfig(
            name="pi05_demo",
            model=ModelConfig(
                paligemma_variant="demo",
                action_expert_variant="demo_expert",
                vision_variant="demo",
                vocab_size=512,
                dtype="float32",
                action_horizon=10,
                max_token_len="auto",
                discrete_state_input=False,
            ),
            data=DataConfig(repo_id="openpi_accel/demo"),
            lr_schedule=ScheduleConfig(warmup_steps=30, peak_lr=1e-3, decay_steps=700, decay_lr=1e-4),
            optimizer=OptimizerConfig(),
            ema_decay=0.98,
            batch_size=16,
            num_train_steps=700,
            log_interval=20,
            save_interval=200,
            keep_period=None,
        ),
    )
}


def get_preset(name: str) -> TrainConfig:
    """The config of that name.

    Raises:
        UserError: no such config; suggests the nearest name.
    """
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"The configs are {', '.join(PRESETS)}."
    raise UserError(f"There is no config named {name!r}. {hint}")
