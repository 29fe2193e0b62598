"""The nearest setting that fits: first what leaves the numbers as they are, then smaller batches, then less to train."""

import dataclasses
from collections.abc import Iterator

from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import GEMMA_VARIANTS, RematConfig, TrainConfig
from openpi_accel.models.flops import sample_flops
from openpi_accel.tools.bench import prompt_length
from openpi_accel.tools.plan.predict import Footprint, footprint
from openpi_accel.train.memory import StepMemory

# What the prediction was off by, at the most (docs/performance.md): a setting is only proposed with this much left.
MARGIN = 0.05
# From fast to small.
_REMAT = (
    RematConfig(gemma="none", siglip="none"),
    RematConfig(gemma="dots", siglip="dots"),
    RematConfig(gemma="dots", siglip="full"),
    RematConfig(gemma="full", siglip="full"),
)
_LORA = {"gemma_2b": "gemma_2b_lora", "gemma_300m": "gemma_300m_lora", "tiny": "tiny_lora"}
_LORA |= {"tiny_expert": "tiny_expert_lora"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A setting and what it needs.

    Attributes:
        config: with global batch, microbatches and fsdp.
        need: on each device.
        options: what to give beside the config that was asked about.
        recomputed: share of the products computed once more, of those that forward and backward pass need.
    """

    config: TrainConfig
    need: StepMemory
    options: tuple[str, ...]
    recomputed: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """Predicts for one number of devices of one kind.

    Attributes:
        acceleration: what is switched on.
        num_devices: GPUs in all.
        limit: bytes of each that JAX may use.
    """

    acceleration: Acceleration
    num_devices: int
    limit: int

    def plan(self, config: TrainConfig, asked: TrainConfig) -> Planned:
        """What a config needs, with the options by which it differs from `asked`."""
        memory = self._footprint(config).memory(
            config.batch_size // self.num_devices, config.fsdp_devices, self.num_devices
        )
        return Planned(
            config=config, need=memory, options=_difference(config, asked), recomputed=_recomputed(config)
        )

    def fits(self, planned: Planned) -> bool:
        """Whether it fits, even if the prediction is as wrong as it has ever been."""
        return planned.need.total * (1 + MARGIN) <= self.limit

    def same_numbers(self, config: TrainConfig) -> Planned | None:
        """The setting of the least recomputation, then the fewest parts, that fits with this batch: sharding,
        recomputation and microbatches change no number but by rounding."""
        return next((planned for planned in self._same_numbers(config) if self.fits(planned)), None)

    def smaller_batch(self, config: TrainConfig) -> Planned | None:
        """The largest batch that fits, sharded over all devices."""
        wide = dataclasses.replace(config, fsdp_devices=self.num_devices, num_microbatches=1)
        best: Planned | None = None
        for remat in _economies(config.remat):
            planned = self.largest_batch(dataclasses.replace(wide, remat=remat), config)
            if planned is not None and (best is None or planned.config.batch_size > best.config.batch_size):
                best = planned
        return best

    def largest_batch(self, config: TrainConfig, asked: TrainConfig) -> Planned | None:
        """The largest batch with everything else as it is."""
        footprint_, unit = self._footprint(config), config.num_microbatches

        def need(samples: int) -> int:
            return footprint_.memory(samples, config.fsdp_devices, self.num_devices).total

        low, high = 0, 1
        while need(high * unit) * (1 + MARGIN) <= self.limit and high < 2**16:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if need(middle * unit) * (1 + MARGIN) <= self.limit else (low, middle)
        if low == 0:
            return None
        return self.plan(dataclasses.replace(config, batch_size=low * unit * self.num_devices), asked)

    def _footprint(self, config: TrainConfig) -> Footprint:
        traced = dataclasses.replace(config, batch_size=config.num_microbatches, fsdp_devices=1)
        return footprint(traced, self.acceleration)

    def _same_numbers(self, config: TrainConfig) -> Iterator[Planned]:
        per_device = config.batch_size // self.num_devices
        parts = [n for n in _powers(config.num_microbatches) if per_device % n == 0]
        shards = [n for n in range(config.fsdp_devices, self.num_devices + 1) if self.num_devices % n == 0]
        for remat in _economies(config.remat):
            for num_microbatches in parts:
                for fsdp_devices in shards:
                    yield self.plan(
                        dataclasses.replace(
                            config, remat=remat, num_microbatches=num_microbatches, fsdp_devices=fsdp_devices
                        ),
                        config,
                    )


def with_adapters(config: TrainConfig) -> TrainConfig | None:
    """The config that trains low-rank adapters, without an average; None where there are none of this size, or it does
    so already."""
    model = config.model
    if model.paligemma_variant not in _LORA or model.action_expert_variant not in _LORA:
        return None
    model = dataclasses.replace(
        model,
        paligemma_variant=_LORA[model.paligemma_variant],  # type: ignore[arg-type]
        action_expert_variant=_LORA[model.action_expert_variant],  # type: ignore[arg-type]
    )
    return dataclasses.replace(config, model=model, ema_decay=None)


def _powers(first: int) -> list[int]:
    return [first * 2**i for i in range(7)]


def _economies(remat: RematConfig) -> list[RematConfig]:
    """This one and those of less memory."""
    order = {"none": 0, "dots": 1, "full": 2}
    smaller = [
        r for r in _REMAT if order[r.gemma] >= order[remat.gemma] and order[r.siglip] >= order[remat.siglip]
    ]
    return [remat, *(r for r in smaller if r != remat)]


def _recomputed(config: TrainConfig) -> float:
    """Share of products: a tower of policy full runs its forward pass twice, of three passes' worth in all."""
    num_cameras = 2
    flops = sample_flops(config.model.architecture, num_cameras, prompt_length(config))
    again = (flops.gemma if config.remat.gemma == "full" else 0) + (
        flops.siglip if config.remat.siglip == "full" else 0
    )
    return again / 3 / flops.total


def _difference(config: TrainConfig, asked: TrainConfig) -> tuple[str, ...]:
    """Options that make `asked` into `config`."""
    pairs = {
        "--fsdp-devices": (config.fsdp_devices, asked.fsdp_devices),
        "--remat.gemma": (config.remat.gemma, asked.remat.gemma),
        "--remat.siglip": (config.remat.siglip, asked.remat.siglip),
        "--num-microbatches": (config.num_microbatches, asked.num_microbatches),
        "--batch-size": (config.batch_size, asked.batch_size),
        "--model.paligemma-variant": (config.model.paligemma_variant, asked.model.paligemma_variant),
        "--model.action-expert-variant": (config.model.action_expert_variant, asked.model.action_expert_variant),
        "--ema-decay": (config.ema_decay, asked.ema_decay),
    }
    return tuple(f"{name} {value}" for name, (value, before) in pairs.items() if value != before)


assert all(large in GEMMA_VARIANTS and small in GEMMA_VARIANTS for large, small in _LORA.items())
