"""What `meta/info.json` says about the columns and cameras."""

import dataclasses
import json
import math
import pathlib
from typing import Any, Literal

from openpi_accel.errors import UserError

CAMERA_DTYPES = ("image", "video")


@dataclasses.dataclass(frozen=True)
class Feature:
    """One column or camera, as declared.

    Attributes:
        dtype: image, video, or the numeric type's name.
        shape: of one frame's value.
        names: of the dimensions, where declared.
    """

    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Camera:
    """One camera.

    Attributes:
        kind: image (PNG or JPEG bytes in the parquet files) or video.
        height, width: pixels, as declared.
        codec: of a video, as declared (for example av1); empty where not declared and for images.
        depth: declared as a depth map, which is no input for pi0.5.
    """

    kind: Literal["image", "video"]
    height: int
    width: int
    codec: str = ""
    depth: bool = False


@dataclasses.dataclass(frozen=True)
class Info:
    """`meta/info.json`.

    Attributes:
        path: the file.
        version: codebase_version, for example v2.1.
        total_episodes, total_frames: as declared; None where not.
        raw: everything in the file.
    """

    path: pathlib.Path
    version: str
    fps: float
    features: dict[str, Feature]
    cameras: dict[str, Camera]
    data_path: str
    video_path: str | None
    total_episodes: int | None
    total_frames: int | None
    raw: dict[str, Any]


def read_info(root: pathlib.Path) -> Info:
    """Reads `meta/info.json`.

    Raises:
        UserError: no dataset there, or the file is not what LeRobot writes; says what is wrong.
    """
    path = root / "meta" / "info.json"
    raw = read_json(path) if path.is_file() else _refuse(root)
    if not isinstance(raw, dict) or not isinstance(raw.get("features"), dict):
        raise UserError(f"{path} has no features: it is not a LeRobot dataset's info.json. Fetch the dataset again.")
    version, fps, data_path = raw.get("codebase_version"), raw.get("fps"), raw.get("data_path")
    if not isinstance(version, str):
        raise UserError(f"{path} names no codebase_version, so its layout is unknown. Fetch the dataset again.")
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not (math.isfinite(fps) and fps > 0):
        raise UserError(f"{path} gives fps as {fps!r}; it must be a positive number.")
    if not isinstance(data_path, str):
        raise UserError(
            f"{path} gives data_path as {data_path!r}; it must be the template of the parquet files' names."
        )
    features, cameras = {}, {}
    for key, entry in raw["features"].items():
        try:
            features[key] = _feature(entry)
            if features[key].dtype in CAMERA_DTYPES:
                cameras[key] = _camera(entry, features[key])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(f"{path}: feature {key!r} is not understood ({error}): {entry!r}") from error
    return Info(
        path=path,
        version=version,
        fps=float(fps),
        features=features,
        cameras=cameras,
        data_path=data_path,
        video_path=raw.get("video_path"),
        total_episodes=raw.get("total_episodes"),
        total_frames=raw.get("total_frames"),
        raw=raw,
    )


def read_json(path: pathlib.Path) -> Any:
    """One JSON file.

    Raises:
        UserError: unreadable or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not readable as JSON ({error}). Fetch the dataset again.") from error


def read_jsonl(path: pathlib.Path) -> list[dict[str, Any]]:
    """One JSON object per line; empty lines are passed over.

    Raises:
        UserError: missing, unreadable, or a line is not a JSON object; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: the dataset is not complete. Fetch it again.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not readable ({error}). Fetch the dataset again.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number} is not JSON ({error}). Fetch the dataset again.") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number} is not a JSON object. Fetch the dataset again.")
        rows.append(row)
    return rows


def _refuse(root: pathlib.Path) -> Any:
    """Says what `root` is instead of a dataset."""
    if not root.exists():
        raise UserError(f"There is no folder {root}.")
    if not root.is_dir():
        raise UserError(f"{root} is a file; a LeRobot dataset is a folder with meta/info.json in it.")
    for parent in list(root.resolve().parents)[:3]:
        if (parent / "meta" / "info.json").is_file():
            raise UserError(f"{root} is a part of a dataset; give the dataset's own folder: {parent}")
    inside = sorted(str(p.parent.parent) for p in root.glob("*/meta/info.json"))
    inside += sorted(str(p.parent.parent) for p in root.glob("*/*/meta/info.json"))
    if inside:
        shown = ", ".join(inside[:5]) + (" …" if len(inside) > 5 else "")
        raise UserError(f"{root} is no dataset, but holds {len(inside)}; give one of them: {shown}")
    state = "is empty" if not any(root.iterdir()) else "has no meta/info.json, so it is no LeRobot dataset"
    raise UserError(
        f"The folder {root} {state}. Give the folder that contains meta/info.json, or fetch the dataset again."
    )


def _feature(entry: dict[str, Any]) -> Feature:
    names = entry.get("names")
    if isinstance(names, dict):  # lerobot once wrote {"motors": [...]}
        names = [name for group in names.values() if isinstance(group, list) for name in group]
    return Feature(
        dtype=str(entry["dtype"]),
        shape=tuple(int(size) for size in entry["shape"]),
        names=tuple(str(name) for name in names) if isinstance(names, list) else None,
    )


def _camera(entry: dict[str, Any], feature: Feature) -> Camera:
    names = [name.lower() for name in feature.names or ()]
    if "height" in names and "width" in names:
        height, width = feature.shape[names.index("height")], feature.shape[names.index("width")]
    elif feature.shape[0] in (1, 3, 4) and feature.shape[-1] not in (1, 3, 4):
        height, width = feature.shape[1], feature.shape[2]
    else:
        height, width = feature.shape[0], feature.shape[1]
    declared = entry.get("info") or entry.get("video_info") or {}
    return Camera(
        kind="video" if feature.dtype == "video" else "image",
        height=height,
        width=width,
        codec=str(declared.get("video.codec") or ""),
        depth=bool(declared.get("video.is_depth_map") or declared.get("is_depth_map")),
    )
