"""lerobot's own LeRobotDataset as the reader of rows: what upstream trains with, for comparisons of speed and content.

Letters: B rows, A action horizon, D values per frame, H W image height and width.
"""

import dataclasses
import importlib
import importlib.metadata
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from openpi_accel.data.lerobot.dataset import LeRobotDataset
from openpi_accel.errors import UserError

_NATIVE = "or take --data.reader native, which reads every format"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows of a dataset.

    Attributes:
        state: B D.
        actions: B A D, and is_pad: B A, True where the episode has already ended.
        tasks: B texts.
        frames: camera -> B times uint8 H W 3, every camera of the dataset.
    """

    state: np.ndarray
    actions: np.ndarray
    is_pad: np.ndarray
    tasks: list[str]
    frames: Mapping[str, list[np.ndarray]]


class BaselineReader:
    """Reads rows through lerobot, one item at a time and all cameras decoded, as upstream's loader does."""

    def __init__(self, dataset: LeRobotDataset, state_key: str, action_key: str, horizon: int) -> None:
        """Opens the dataset with lerobot.

        Args:
            dataset: the same dataset, opened natively: says where it is and names bad frames.
            state_key, action_key: columns.
            horizon: A.

        Raises:
            UserError: lerobot is not installed, or the installed one does not read this format.
        """
        self._arguments = dataset, state_key, action_key, horizon
        self._state_key, self._action_key, self._dataset = state_key, action_key, dataset
        self._lock = threading.Lock()  # lerobot's decoders are not made for several threads
        theirs = _lerobot_module()
        reads = theirs.CODEBASE_VERSION
        if reads.split(".")[0] != dataset.version.split(".")[0]:  # lerobot itself would first ask the Hub for another
            raise self._refused(f"it reads {reads}.")
        steps = {action_key: [step / dataset.fps for step in range(horizon)]}
        try:
            self._theirs = theirs.LeRobotDataset(dataset.root.name, root=dataset.root, delta_timestamps=steps)
        except Exception as error:  # it has several kinds of its own, and those of the Hub's client
            raise self._refused(_first_line(error)) from error
        if len(self._theirs) != dataset.num_frames:
            raise UserError(
                f"lerobot finds {len(self._theirs)} frames in {dataset.root}, and there are {dataset.num_frames}. "
                f"Fetch the dataset again, {_NATIVE}."
            )

    def __reduce__(self) -> tuple[Callable[..., "BaselineReader"], tuple[Any, ...]]:
        return BaselineReader, self._arguments  # another process opens its own files

    def read(self, rows: np.ndarray) -> Rows:
        """These dataset rows, in their order.

        Raises:
            FrameError: lerobot cannot read one of them.
        """
        with self._lock:
            items = [self._item(int(row)) for row in rows]
        return Rows(
            state=np.stack([np.asarray(item[self._state_key]) for item in items]).reshape(len(items), -1),
            actions=np.stack([np.asarray(item[self._action_key]) for item in items]).reshape(
                len(items), self._arguments[3], -1
            ),
            is_pad=np.stack([np.asarray(item[f"{self._action_key}_is_pad"]) for item in items]),
            tasks=[item["task"] for item in items],
            frames={camera: [_pixels(item[camera]) for item in items] for camera in self._dataset.cameras},
        )

    def _refused(self, why: str) -> UserError:
        return UserError(
            f"lerobot {importlib.metadata.version('lerobot')} cannot open {self._dataset.root} (format "
            f"{self._dataset.version}): {why} Releases up to 0.3.3 read v2.0 and v2.1, later ones v3.0: install one "
            f"that fits, {_NATIVE}."
        )

    def _item(self, row: int) -> Mapping[str, Any]:
        try:
            item: Mapping[str, Any] = self._theirs[row]
            return item
        except Exception as error:  # whatever a decoder, the tables or torch raise
            raise self._dataset.frame_error("any", row, f"lerobot cannot read it ({_first_line(error)})") from error


def _lerobot_module() -> Any:
    try:
        return importlib.import_module("lerobot.datasets.lerobot_dataset")
    except (ImportError, RuntimeError, OSError) as error:
        raise UserError(
            f"--data.reader lerobot: lerobot cannot be imported ({_first_line(error)}). Install it with its readers "
            f"(pip install 'openpi_accel[lerobot]'), {_NATIVE}."
        ) from error


def _pixels(image: Any) -> np.ndarray:
    """C H W, float in 0..1 as lerobot gives it, to uint8 H W C: the stored value, as v / 255 in float32 rounds back."""
    array = np.asarray(image)
    if array.dtype != np.uint8:
        array = np.rint(array * 255).astype(np.uint8)
    return np.ascontiguousarray(array.transpose(1, 2, 0))


def _first_line(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if line.endswith(".") else f"{line}."
