"""The acceleration switches, as one typed object. All are off by default, which is upstream's behaviour."""

import dataclasses
import difflib
from collections.abc import Mapping

from openpi_accel.config.schema import CAMERA_SLOTS
from openpi_accel.errors import UserError

# OPENPI_ names that are no acceleration: read elsewhere (environment.py, the launchers).
OTHER_NAMES = ("OPENPI_DATA_HOME", "OPENPI_PYTHON", "OPENPI_STRICT_EQUIV")
_TRUE, _FALSE = ("1", "true"), ("0", "false", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceleration:
    """Which accelerations are on.

    Attributes:
        skip_images: OPENPI_SKIP_IMAGES, always-masked camera slots to leave out (no image, no SigLIP, no tokens), or
            ("auto",) for every slot that the data never fills.
        skip_video_decode: OPENPI_SKIP_VIDEO_DECODE, decode only the camera frames that the model consumes.
    """

    skip_images: tuple[str, ...] = ()
    skip_video_decode: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str], base: "Acceleration | None" = None) -> "Acceleration":
        """Reads the OPENPI_ switches of `env` over `base`; pure.

        Raises:
            UserError: a value that is no switch value, or an OPENPI_ name that does not exist.
        """
        base = base or cls()
        known = {"OPENPI_SKIP_IMAGES", "OPENPI_SKIP_VIDEO_DECODE", *OTHER_NAMES}
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
            skip_video_decode=parse_switch("OPENPI_SKIP_VIDEO_DECODE", env, base.skip_video_decode),
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
