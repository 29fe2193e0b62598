"""The nearest setting that fits: first what leaves the numbers as they are, then a smaller batch."""

import dataclasses
import itertools
from collections.abc import Iterator

from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import RematConfig, TrainConfig
from openpi_accel.models.flops import FORWARD_AND_BACKWARD, sample_flops
from openpi_accel.tools.bench import prompt_length
from openpi_accel.tools.plan.predict import footprint, same_trace
from openpi_accel.train.memory import StepMemory

# More than the prediction was ever off by (docs/memory.md): a setting fits with this much left.
MARGIN = 0.05
# From fast to small.
_REMAT = (
    RematConfig(gemma="none", siglip="none"),
    RematConfig(gemma="dots", siglip="dots"),
    RematConfig(gemma="dots", siglip="full"),
    RematConfig(gemma="full", siglip="full"),
)
# Samples of a microbatch below which products get too small to keep a GPU busy: only where nothing else fits.
_LARGE = 8
_LORA = {"gemma_2b": "gemma_2b_lora", "gemma_300m": "gemma_300m_lora", "tiny": "tiny_lora"}
_LORA |= {"tiny_expert": "tiny_expert_lora"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A setting and what it needs.

    Attributes:
        config: with global batch, microbatches and fsdp.
        need: memory of each device.
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
        return Planned(
            config=config,
            need=self._need(config, config.batch_size // self.num_devices),
            options=_difference(config, asked),
            recomputed=self._recomputed(config),
        )

    def fits(self, planned: Planned) -> bool:
        """Whether it fits, even if the prediction is as wrong as it has ever been."""
        return planned.need.total * (1 + MARGIN) <= self.limit

    def same_numbers(self, config: TrainConfig, asked: TrainConfig | None = None) -> Planned | None:
        """The setting of the least recomputation, then the fewest parts, then the least sharding, that fits with this
        batch: all three change numbers by no more than rounding."""
        if self._hopeless(config):
            return None
        return next((planned for planned in self._same_numbers(config, asked or config) if self.fits(planned)), None)

    def smaller_batch(self, config: TrainConfig, asked: TrainConfig) -> Planned | None:
        """The largest batch that fits, sharded over all devices, up to that of the config."""
        if self._hopeless(config):
            return None
        wide = dataclasses.replace(config, fsdp_devices=self.num_devices, num_microbatches=1)
        best: Planned | None = None
        for remat in _economies(config.remat):
            planned = self.largest_batch(dataclasses.replace(wide, remat=remat), asked)
            if planned is not None and (best is None or planned.config.batch_size > best.config.batch_size):
                best = planned
        return best

    def largest_batch(self, config: TrainConfig, asked: TrainConfig) -> Planned | None:
        """The largest batch, up to the config's, with everything else as it is."""
        unit = config.num_microbatches

        def fits(samples: int) -> bool:
            return self._need(config, samples * unit).total * (1 + MARGIN) <= self.limit

        low, high = 0, config.batch_size // self.num_devices // unit + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        if low == 0:
            return None
        return self.plan(dataclasses.replace(config, batch_size=low * unit * self.num_devices), asked)

    def _hopeless(self, config: TrainConfig) -> bool:
        """Whether the state alone is too large, however sharded."""
        one = dataclasses.replace(config, num_microbatches=1)
        state_bytes = footprint(same_trace(one), self.acceleration).state_bytes(self.num_devices)
        return state_bytes * (1 + MARGIN) > self.limit

    def _need(self, config: TrainConfig, samples_per_device: int) -> StepMemory:
        return footprint(same_trace(config), self.acceleration).memory(
            samples_per_device, config.num_microbatches, config.fsdp_devices
        )

    def _recomputed(self, config: TrainConfig) -> float:
        """Share of products: a tower of policy full runs its forward pass twice, of three passes' worth in all."""
        num_cameras = footprint(same_trace(config), self.acceleration).num_cameras
        flops = sample_flops(config.model.architecture, num_cameras, prompt_length(config))
        gemma = flops.gemma if config.remat.gemma == "full" else 0
        siglip = flops.siglip if config.remat.siglip == "full" else 0
        return (gemma + siglip) / FORWARD_AND_BACKWARD / flops.total

    def _same_numbers(self, config: TrainConfig, asked: TrainConfig) -> Iterator[Planned]:
        per_device = config.batch_size // self.num_devices
        parts = [n for n in _doublings(config.num_microbatches) if per_device % n == 0]
        shards = [n for n in range(config.fsdp_devices, self.num_devices + 1) if self.num_devices % n == 0]
        large = [n for n in parts if per_device // n >= _LARGE or n == config.num_microbatches]
        for some_parts in (large, [n for n in parts if n not in large]):
            for remat, num_microbatches, fsdp_devices in itertools.product(
                _economies(config.remat), some_parts, shards
            ):
                changes = {"remat": remat, "num_microbatches": num_microbatches, "fsdp_devices": fsdp_devices}
                yield self.plan(dataclasses.replace(config, **changes), asked)  # type: ignore[arg-type]


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


def _doublings(first: int) -> list[int]:
    return [first * 2**i for i in range(7)]


def _economies(remat: RematConfig) -> list[RematConfig]:
    """This one and those of less memory."""
    order = {"none": 0, "dots": 1, "full": 2}
    smaller = [r for r in _REMAT if order[r.gemma] >= order[remat.gemma] and order[r.siglip] >= order[remat.siglip]]
    return [remat, *(r for r in smaller if r != remat)]


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
