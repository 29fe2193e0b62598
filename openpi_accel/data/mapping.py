"""Which dataset columns feed the model: checked where configured, proposed where not."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping

from openpi_accel.config.schema import AUTO, CAMERA_SLOTS, CameraKeys, DataConfig
from openpi_accel.data.lerobot.dataset import LeRobotDataset
from openpi_accel.errors import UserError

_WRIST = ("wrist", "hand", "gripper")
# Best first: a name that says "base" beats one that only says "image".
_BASE = (
    "base", "exterior", "external", "agentview", "third", "front", "top", "high", "overhead", "scene", "main", "image",
)  # fmt: skip
_NOT_COLOUR = ("depth", "mask", "segmentation")
_STATE_KEYS = ("observation.state", "state")
_ACTION_KEYS = ("action", "actions")
# Columns of every LeRobot dataset that are no robot signal.
_BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericColumns:
    """The state and the actions.

    Attributes:
        state_key, action_key: names of the columns.
        state_dim, action_dim: their unpadded dimensions.
        notes: what was chosen without being asked, one line each, to be shown to the user.
    """

    state_key: str
    action_key: str
    state_dim: int
    action_dim: int
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataMapping(NumericColumns):
    """All columns and cameras that a run reads; at least one camera slot is fed."""

    cameras: CameraKeys


def propose_mapping(dataset: LeRobotDataset) -> DataMapping:
    """Guesses the mapping from the names of the features, and says in `notes` what it took.

    Raises:
        UserError: no camera's name fits, or there is no column for the state or the actions.
    """
    return resolve_mapping(DataConfig(repo_id=str(dataset.root)), dataset)


def resolve_mapping(data: DataConfig, dataset: LeRobotDataset) -> DataMapping:
    """The configured mapping, checked against the dataset; what is not configured is proposed.

    Raises:
        UserError: a configured key is missing (suggests the nearest), or nothing fits.
    """
    where = str(dataset.root)
    notes: list[str] = []
    cameras = data.cameras
    if not cameras.as_dict():
        colour = [key for key, camera in dataset.cameras.items() if not camera.depth]
        cameras, notes = _propose_cameras(colour, where)
    else:
        for slot, key in cameras.as_dict().items():
            if key not in dataset.cameras:
                raise UserError(
                    f"{where} has no camera {key!r} (for {slot}).{_suggest(key, dataset.cameras)} "
                    f"{_camera_help(dataset.cameras)}"
                )
    columns = resolve_columns(data, dataset)
    return DataMapping(
        cameras=cameras,
        state_key=columns.state_key,
        action_key=columns.action_key,
        state_dim=columns.state_dim,
        action_dim=columns.action_dim,
        notes=(*notes, *columns.notes),
    )


def resolve_columns(data: DataConfig, dataset: LeRobotDataset) -> NumericColumns:
    """The configured columns of state and actions, checked; what is `auto` is found by its usual name.

    Raises:
        UserError: a configured column is missing (suggests the nearest), or none has a usual name.
    """
    where = str(dataset.root)
    notes: list[str] = []
    numeric = {
        key: int(feature.shape[0])
        for key, feature in dataset.features.items()
        if key not in dataset.cameras
        and key not in _BOOKKEEPING
        and len(feature.shape) == 1
        and feature.dtype != "string"
    }
    keys = {}
    for what, option, configured, usual in (
        ("state", "--data.state-key", data.state_key, _STATE_KEYS),
        ("actions", "--data.action-key", data.action_key, _ACTION_KEYS),
    ):
        if configured == AUTO:
            key = next((k for k in usual if k in numeric), None)
            if key is None:
                raise UserError(
                    f"{where} has none of the columns {', '.join(usual)}. Name the one with the {what} by {option}; "
                    f"numeric columns are: {_list(numeric)}"
                )
            notes.append(f"{what} <- {key}")
        elif configured in numeric:
            key = configured
        else:
            raise UserError(
                f"{where} has no numeric column {configured!r} ({option}).{_suggest(configured, numeric)} "
                f"Numeric columns are: {_list(numeric)}"
            )
        keys[what] = key
    return NumericColumns(
        state_key=keys["state"],
        action_key=keys["actions"],
        state_dim=numeric[keys["state"]],
        action_dim=numeric[keys["actions"]],
        notes=tuple(notes),
    )


def _propose_cameras(keys: list[str], where: str) -> tuple[CameraKeys, list[str]]:
    usable = [key for key in keys if not _says(key, _NOT_COLOUR)]
    wrists = [key for key in usable if _says(key, _WRIST)]
    others = [key for key in usable if key not in wrists]
    slots: dict[str, str] = {}

    ranked = sorted((_base_rank(key), len(key), key) for key in others)
    if ranked and (ranked[0][0] < len(_BASE) or len(others) == 1):
        slots["base_0_rgb"] = ranked[0][2]

    # A name that says its side goes to that side; the rest fill up from the left, as upstream's one-armed robots do.
    for side in ("left", "right"):
        fitting = [key for key in wrists if side in _words(key)]
        if fitting:
            slots[f"{side}_wrist_0_rgb"] = sorted(fitting, key=lambda key: (len(key), key))[0]
    for key in sorted(wrists):
        free = [s for s in ("left_wrist_0_rgb", "right_wrist_0_rgb") if s not in slots]
        if free and key not in slots.values() and not {"left", "right"} & set(_words(key)):
            slots[free[0]] = key

    if not slots:
        raise UserError(f"{where}: no camera's name says what it looks at. {_camera_help(keys)}")
    notes = [f"{slot} <- {slots[slot]}" if slot in slots else f"{slot} is empty" for slot in CAMERA_SLOTS]
    unused = [key for key in keys if key not in slots.values()]
    if unused:
        notes.append(f"cameras not used: {', '.join(unused)}")
    return CameraKeys(**slots), notes


def _words(key: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", key.removeprefix("observation.").removeprefix("images.").lower())


def _says(key: str, words: Iterable[str]) -> bool:
    return any(word in part for part in _words(key) for word in words)


def _base_rank(key: str) -> int:
    return next((rank for rank, word in enumerate(_BASE) if _says(key, (word,))), len(_BASE))


def _camera_help(keys: Iterable[str] | Mapping[str, object]) -> str:
    return (
        f"Cameras are: {_list(keys)}. Map them by --data.cameras.base-0-rgb=<camera> "
        "(and --data.cameras.left-wrist-0-rgb, --data.cameras.right-wrist-0-rgb)."
    )


def _list(keys: Iterable[str]) -> str:
    return ", ".join(keys) or "none"


def _suggest(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.4)
    return f" Did you mean {close[0]!r}?" if close else ""
