"""What worker processes are given to do in tests; imports no JAX, so that they start fast."""

import os
import pathlib
import signal
import time

import numpy as np

from openpi_accel.data import now_reading
from openpi_accel.data.lerobot.frames import FrameError


def misbehave(rows: np.ndarray) -> np.ndarray:
    """Fails in the way that the first row names."""
    match int(rows[0]):
        case 1:
            raise FrameError(pathlib.Path("set"), 17, 3, 4, "top", "it is damaged")
        case 2:
            raise KeyError("no such thing")
        case 3:
            raise type("Unheard", (Exception,), {})("of")
        case 4:
            now_reading.note(8, 15)
            os.kill(os.getpid(), signal.SIGKILL)
        case 5:
            raise FileNotFoundError("gone")
        case 6:
            time.sleep(600)
    return rows


def echo(rows: np.ndarray) -> np.ndarray:
    """The rows."""
    return rows
