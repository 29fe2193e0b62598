"""The learning-rate schedule and the optimizer, as optax transformations.

The optimizer's state keeps optax's own nesting, because upstream's checkpoints are laid out by it.
"""

import optax

from openpi_accel.config.schema import OptimizerConfig, ScheduleConfig


def make_schedule(config: ScheduleConfig) -> optax.Schedule:
    """Learning rate by step: linear from peak / (warmup + 1) to peak, then a cosine to decay_lr at decay_steps."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.peak_lr / (config.warmup_steps + 1),
        peak_value=config.peak_lr,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        end_value=config.decay_lr,
    )


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) on gradients whose global norm is clipped; the decay covers every leaf."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_gradient_norm),
        optax.adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay),
    )
