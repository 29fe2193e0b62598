"""What worker processes are given to do in tests; imports no JAX, so that they start fast."""

import os
import pathlib
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from openpi_accel.data import now_reading
from openpi_accel.data.lerobot.dataset import LeRobotDataset
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


class Looking:
    """Gives values of a dataset, and where they lie in this process's memory.

    Args:
        dataset: opened.
        columns: to look at; one of them is `action`.
    """

    def __init__(self, dataset: LeRobotDataset, columns: Sequence[str]) -> None:
        self._dataset, self._columns = dataset, columns

    def __call__(self, rows: np.ndarray) -> dict[str, Any]:
        """The actions, the Arrow files that are mapped (path -> inode), and which columns lie in one."""
        values = self._dataset.column("action")[rows]
        mappings = [line.split(maxsplit=5) for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
        ours = [fields for fields in mappings if fields[-1].endswith(".arrow")]
        spans = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in ours]
        places = {key: self._dataset.column(key).ctypes.data for key in self._columns}
        return {
            "pid": os.getpid(),
            "mapped": {fields[5]: int(fields[4]) for fields in ours},
            "inside": {key: any(start <= at < end for start, end in spans) for key, at in places.items()},
            "action": values,
        }
