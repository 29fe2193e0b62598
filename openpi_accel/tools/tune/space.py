"""The settings that are searched, as one value, and the steps from one to its neighbours."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import RematConfig, RematPolicy, TrainConfig

# Option or variable by which the user fixes a field.
_FIXED_BY = {
    "OPENPI_SKIP_IMAGES": "skip_images",
    "OPENPI_FLASH_ATTN": "attention",
    "OPENPI_FLASH_IMPL": "attention",
    "OPENPI_BATCH_CAMERAS": "batch_cameras",
    "OPENPI_CAST_EARLY": "cast_early",
    "OPENPI_UNROLL_LAYERS": "unroll_layers",
    "--remat.gemma": "remat_gemma",
    "--remat.siglip": "remat_siglip",
    "--batch-size": "batch_per_device",
    "--num-microbatches": "num_microbatches",
    "--fsdp-devices": "fsdp_devices",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One setting of the step.

    Attributes:
        skip_images: leave out the cameras that the data never fill.
        attention: the reference, or by blocks with this implementation.
        batch_cameras, cast_early, unroll_layers: as in config.flags.Acceleration.
        remat_gemma, remat_siglip: what the backward pass recomputes.
        batch_per_device: samples of each device, all microbatches together.
        num_microbatches, fsdp_devices: as in TrainConfig.
    """

    skip_images: bool
    attention: Literal["reference", "xla", "cudnn", "auto"]
    batch_cameras: bool
    cast_early: bool
    unroll_layers: bool
    remat_gemma: RematPolicy
    remat_siglip: RematPolicy
    batch_per_device: int
    num_microbatches: int
    fsdp_devices: int

    @property
    def environment(self) -> dict[str, str]:
        """The OPENPI_ switches, those that are off too."""
        flags = {
            "OPENPI_BATCH_CAMERAS": self.batch_cameras,
            "OPENPI_CAST_EARLY": self.cast_early,
            "OPENPI_UNROLL_LAYERS": self.unroll_layers,
            "OPENPI_FLASH_ATTN": self.attention != "reference",
        }
        switches = {name: str(int(on)) for name, on in flags.items()}
        if self.attention != "reference":
            switches["OPENPI_FLASH_IMPL"] = self.attention
        return switches | {"OPENPI_SKIP_IMAGES": "auto" if self.skip_images else ""}

    def arguments(self, num_devices: int) -> list[str]:
        """Options of scripts/train.py."""
        values = {
            "--remat.gemma": self.remat_gemma,
            "--remat.siglip": self.remat_siglip,
            "--batch-size": self.batch_per_device * num_devices,
            "--num-microbatches": self.num_microbatches,
            "--fsdp-devices": self.fsdp_devices,
        }
        return [word for name, value in values.items() for word in (name, str(value))]

    def config(self, config: TrainConfig, num_devices: int) -> TrainConfig:
        """`config` with these settings."""
        return dataclasses.replace(
            config,
            remat=RematConfig(gemma=self.remat_gemma, siglip=self.remat_siglip),
            batch_size=self.batch_per_device * num_devices,
            num_microbatches=self.num_microbatches,
            fsdp_devices=self.fsdp_devices,
        )

    def acceleration(self) -> Acceleration:
        """The switches of these settings."""
        return Acceleration.from_env(self.environment)

    def __str__(self) -> str:
        on = {"no skipped cameras": not self.skip_images, "cameras one by one": not self.batch_cameras}
        on |= {"late casts": not self.cast_early, "scanned": not self.unroll_layers, "unrolled": self.unroll_layers}
        parts = [f"batch {self.batch_per_device} per device", f"attention {self.attention}"]
        parts += [f"remat {self.remat_gemma}/{self.remat_siglip}", *(name for name, shown in on.items() if shown)]
        parts += [f"{self.num_microbatches} microbatches"] if self.num_microbatches > 1 else []
        parts += [f"fsdp {self.fsdp_devices}"] if self.fsdp_devices > 1 else []
        return ", ".join(parts)


def start_point(config: TrainConfig, acceleration: Acceleration, num_devices: int) -> Point:
    """The settings of a config and its switches: upstream's, where the user says nothing."""
    return Point(
        skip_images=bool(acceleration.skip_images),
        attention=acceleration.flash_impl if acceleration.flash_attn else "reference",
        batch_cameras=acceleration.batch_cameras,
        cast_early=acceleration.cast_early,
        unroll_layers=acceleration.unroll_layers,
        remat_gemma=config.remat.gemma,
        remat_siglip=config.remat.siglip,
        batch_per_device=max(1, config.batch_size // num_devices),
        num_microbatches=config.num_microbatches,
        fsdp_devices=config.fsdp_devices,
    )


def fixed_fields(argv: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
    """The fields that the user has decided, by an option or a variable."""
    given = {word.partition("=")[0] for word in argv} | set(env)
    return frozenset(field for name, field in _FIXED_BY.items() if name in given)


def all_on(point: Point, fixed: frozenset[str]) -> Point:
    """The corner where all that may save time is on, whatever memory it takes."""
    on: dict[str, Any] = {
        "skip_images": True,
        "attention": "auto",
        "batch_cameras": True,
        "cast_early": True,
        "unroll_layers": True,
        "remat_gemma": "dots",
        "remat_siglip": "dots",
    }
    return dataclasses.replace(point, **{name: value for name, value in on.items() if name not in fixed})


def neighbours(point: Point, fixed: frozenset[str], num_devices: int) -> Iterator[Point]:
    """Settings that differ in one thing, in the order in which they are worth trying. A batch as large as memory allows
    is chosen afterwards, where it is not fixed."""
    changes: list[dict[str, Any]] = []
    changes += [{"fsdp_devices": n} for n in (num_devices, 1) if n != point.fsdp_devices]
    smaller = point.batch_per_device * 7 // 8 // 8 * 8
    if smaller:
        changes.append({"batch_per_device": smaller})
    changes += [{"remat_siglip": policy} for policy in ("dots", "full", "none") if policy != point.remat_siglip]
    changes += [{"remat_gemma": policy} for policy in ("dots", "full", "none") if policy != point.remat_gemma]
    changes.append({"num_microbatches": 2 * point.num_microbatches})
    if point.num_microbatches > 1:
        changes.append({"num_microbatches": point.num_microbatches // 2})
    changes.append({"unroll_layers": not point.unroll_layers})
    changes += [{"attention": name} for name in ("auto", "xla", "reference") if name != point.attention]
    changes += [{name: not getattr(point, name)} for name in ("cast_early", "batch_cameras", "skip_images")]
    for change in changes:
        if not fixed.intersection(change):
            yield dataclasses.replace(point, **change)
