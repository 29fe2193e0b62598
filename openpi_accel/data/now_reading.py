"""Which frame this process is reading, in memory that outlives it: a worker that is killed cannot say it any more."""

import struct
from typing import Any

_FORMAT = "<qq"
SIZE = struct.calcsize(_FORMAT)
_place: Any = None


def share(place: Any) -> None:
    """From now on `note` writes to this buffer of SIZE bytes."""
    global _place
    _place = place
    note(-1, -1)


def note(episode: int, frame: int) -> None:
    """This frame is being read; -1, -1 after the last."""
    if _place is not None:
        struct.pack_into(_FORMAT, _place, 0, episode, frame)


def noted(place: Any) -> tuple[int, int] | None:
    """Episode and frame in a shared buffer; None for none."""
    episode, frame = struct.unpack_from(_FORMAT, place, 0)
    return None if frame < 0 else (episode, frame)
