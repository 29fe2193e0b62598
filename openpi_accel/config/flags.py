"""The acceleration switches, as one typed object. All are off by default, which is upstream's behaviour."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Literal, cast, get_args

from openpi_accel.config.schema import CAMERA_SLOTS
from openpi_accel.errors import UserError

# OPENPI_ names that are no acceleration: read elsewhere (environment.py, the launchers).
OTHER_NAMES = ("OPENPI_CACHE_HOME", "OPENPI_DATA_HOME", "OPENPI_DOCTOR", "OPENPI_PYTHON", "OPENPI_STRICT_EQUIV")
FlashImpl = Literal["xla", "cudnn", "auto"]
_SWITCHES = {
    "OPENPI_SKIP_VIDEO_DECODE": "skip_video_decode",
    "OPENPI_WORKER_CPU": "worker_cpu",
    "OPENPI_FLASH_ATTN": "flash_attn",
    "OPENPI_BATCH_CAMERAS": "batch_cameras",
    "OPENPI_CAST_EARLY": "cast_early",
    "OPENPI_UNROLL_LAYERS": "unroll_layers",
}
_TRUE, _FALSE = ("1", "true"), ("0", "false", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceleration:
    """Which accelerations are on.

    Attributes:
        skip_images: OPENPI_SKIP_IMAGES, always-masked camera slots to leave out (no image, no SigLIP, no tokens), or
            ("auto",) for every slot that the data never fills.
        skip_video_decode: OPENPI_SKIP_VIDEO_DECODE, decode only the camera frames that the model consumes.
        worker_cpu: OPENPI_WORKER_CPU, data workers are processes without GPU, on cores away from the trainer's own.
        flash_attn: OPENPI_FLASH_ATTN, keep no attention probabilities for the backward pass, use the mask's structure.
        flash_impl: OPENPI_FLASH_IMPL, how: xla, cudnn (bfloat16 on an NVIDIA GPU), or auto, which measures both once
            per tower and takes the faster.
        batch_cameras: OPENPI_BATCH_CAMERAS, all cameras through the vision tower in one pass.
        cast_early: OPENPI_CAST_EARLY, cast weights to the compute dtype once per step.
        unroll_layers: OPENPI_UNROLL_LAYERS, a plain loop over the layers, without what feeds nothing.
    """

    skip_images: tuple[str, ...] = ()
    skip_video_decode: bool = False
    worker_cpu: bool = False
    flash_attn: bool = False
    flash_impl: FlashImpl = "xla"
    batch_cameras: bool = False
    cast_early: bool = False
    unroll_layers: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str], base: "Acceleration | None" = None) -> "Acceleration":
        """Reads the OPENPI_ switches of `env` over `base`; pure.

        Raises:
            UserError: a value that is no switch value, or an OPENPI_ name that does not exist.
        """
        base = base or cls()
        known = {"OPENPI_SKIP_IMAGES", "OPENPI_FLASH_IMPL", *_SWITCHES, *OTHER_NAMES}
        for name in sorted(env):
            if name.startswith("OPENPI_") and name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {close[0]}?" if close else f" The switches are {', '.join(sorted(known))}."
                raise UserError(
                    f"{name} is set, but this version has no such switch.{hint} Unset it with: unset {name}"
                )
        return dataclasses.replace(
            base,
            skip_images=_slots(env["OPENPI_SKIP_IMAGES"]) if "OPENPI_SKIP_IMAGES" in env else base.skip_images,
            flash_impl=_flash_impl(env, base.flash_impl),
            **{field: parse_switch(name, env, getattr(base, field)) for name, field in _SWITCHES.items()},
        )


def parse_switch(name: str, env: Mapping[str, str], default: bool) -> bool:
    """A 0/1/true/false variable; anything else is a UserError that names it."""
    value = env.get(name)
    if value is None:
        return default
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise UserError(f"{name}={value!r} is neither on nor off. Write {name}=1 or {name}=0.")


def _flash_impl(env: Mapping[str, str], default: FlashImpl) -> FlashImpl:
    value = env.get("OPENPI_FLASH_IMPL", default)
    if value not in get_args(FlashImpl):
        raise UserError(
            f"OPENPI_FLASH_IMPL={value!r} is no implementation. Choose one of {', '.join(get_args(FlashImpl))}."
        )
    return cast(FlashImpl, value)


def _slots(value: str) -> tuple[str, ...]:
    slots = tuple(s for s in (part.strip() for part in value.split(",")) if s)
    if slots == ("auto",):
        return slots
    for slot in slots:
        if slot not in CAMERA_SLOTS:
            close = difflib.get_close_matches(slot, CAMERA_SLOTS, n=1)
            hint = f" Did you mean {close[0]}?" if close else f" The slots are {', '.join(CAMERA_SLOTS)}, or auto."
            raise UserError(f"OPENPI_SKIP_IMAGES names {slot!r}, which is no camera slot of the model.{hint}")
    if set(slots) == set(CAMERA_SLOTS):
        raise UserError(
            "OPENPI_SKIP_IMAGES leaves out every camera; keep at least one of " + ", ".join(CAMERA_SLOTS) + "."
        )
    return slots
