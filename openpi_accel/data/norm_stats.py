"""Normalisation statistics: upstream's file format, normalising and its inverse.

D is the number of unpadded dimensions of the state or of the actions.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from openpi_accel.errors import UserError

Normalization = Literal["quantile", "zscore"]
EPSILON = 1e-6
# Distance between the 1 % and 99 % quantiles of a normal distribution, in standard deviations.
GAUSS_WIDTH = 2 * 2.3263478740408408
NARROW_RANGE = 1e-2
_OUTLIER = 0.01  # by how much a value may easily differ, for messages
_ROUNDING = 1e-12  # std over mean of equal numbers
FILE_NAME = "norm_stats.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """Of one key, each D float64. Quantiles may be absent in files made for z-score normalisation."""

    mean: np.ndarray
    std: np.ndarray
    q01: np.ndarray | None = None
    q99: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputedFor:
    """What statistics were computed for. Upstream's loader ignores this part of the file.

    Attributes:
        dataset: repo id.
        fingerprint: hash of the state and action columns.
        num_frames: frames that went in.
        action_horizon: steps in a chunk.
        delta_action_dims: leading action dimensions taken relative to the state.
        state_key, action_key: columns.
        min_state_range, min_action_range: the floors under q99 - q01 that were applied; 0 is none.
    """

    dataset: str
    fingerprint: str
    num_frames: int
    action_horizon: int
    delta_action_dims: int
    state_key: str
    action_key: str
    min_state_range: float = 0.0
    min_action_range: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormStats:
    """Statistics of state and actions; `computed_for` is None in files that do not record it (upstream's)."""

    state: Statistics
    actions: Statistics
    computed_for: ComputedFor | None = None


def norm_stats_path(assets_base_dir: str | os.PathLike[str], config_name: str, asset_id: str) -> pathlib.Path:
    """<assets>/<config>/<asset_id>/norm_stats.json."""
    return pathlib.Path(assets_base_dir) / config_name / asset_id / FILE_NAME


def load_norm_stats(path: str | os.PathLike[str], *, command: str) -> NormStats:
    """Reads upstream's file format; extra keys are ignored.

    Args:
        path: the file.
        command: what computes it (`stats_command`), for messages.

    Raises:
        UserError: missing, or no such file; says how to compute it.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(
            f"There are no normalisation statistics at {path}.\nCompute them from the dataset (reads numbers only, "
            f"takes seconds):\n    {command}"
        )
    try:
        content = json.loads(path.read_text())
        keys = content["norm_stats"]
        stats = {key: _statistics(keys[key]) for key in ("state", "actions")}
        record = content.get("computed_for")
        computed_for = None if record is None else _computed_for(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not a file of normalisation statistics ({type(error).__name__}: {error}). "
            f"Write it anew: {command}"
        ) from error
    return NormStats(**stats, computed_for=computed_for)


def save_norm_stats(path: str | os.PathLike[str], stats: NormStats) -> None:
    """Writes upstream's file format, whole or not at all."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "norm_stats": {
            key: {
                name: None if (value := getattr(of_key, name)) is None else value.tolist()
                for name in ("mean", "std", "q01", "q99")
            }
            for key, of_key in (("state", stats.state), ("actions", stats.actions))
        }
    }
    if stats.computed_for is not None:
        content["computed_for"] = dataclasses.asdict(stats.computed_for)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def normalize(x: np.ndarray, stats: Statistics, how: Normalization) -> np.ndarray:
    """... D -> ... D float64, as upstream: statistics longer than x are cut.

    Raises:
        UserError: statistics shorter than x, or without quantiles where they are needed.
    """
    low, scale = _affine(stats, how, x.shape[-1])
    return (x - low) / scale * 2.0 - 1.0 if how == "quantile" else (x - low) / scale


def unnormalize(x: np.ndarray, stats: Statistics, how: Normalization) -> np.ndarray:
    """Inverse of `normalize`."""
    low, scale = _affine(stats, how, x.shape[-1])
    x = np.asarray(x, np.float64)
    return (x + 1.0) / 2.0 * scale + low if how == "quantile" else x * scale + low


def check_computed_for(stats: NormStats, expected: ComputedFor, *, command: str) -> list[str]:
    """Compares what the statistics were computed for with what they are used for.

    Returns:
        Warnings: differences that may be meant (another dataset, another horizon).

    Raises:
        UserError: statistics of absolute actions used with delta actions, or the reverse.
    """
    found = stats.computed_for
    if found is None:
        return []
    if found.delta_action_dims != expected.delta_action_dims:
        raise UserError(
            f"The normalisation statistics were computed with --data.delta-action-dims={found.delta_action_dims}, but "
            f"this run uses {expected.delta_action_dims}: actions would be scaled wrongly. Compute them anew: {command}"
        )
    warnings = []
    for name in ("action_horizon", "state_key", "action_key", "fingerprint"):
        of_file, of_run = getattr(found, name), getattr(expected, name)
        if of_file != of_run:
            what = "another state of the data" if name == "fingerprint" else f"{name} {of_file}, this run uses {of_run}"
            warnings.append(f"The normalisation statistics were computed for {what}. If that is not meant: {command}")
    return warnings


def widths(stats: Statistics, how: Normalization) -> np.ndarray:
    """D: the range that becomes [-1, 1] (quantile), or that of a normal distribution with this std (z-score)."""
    if how == "quantile":
        q01, q99 = _quantiles(stats)
        return q99 - q01
    return stats.std * GAUSS_WIDTH


def narrow_range_warnings(
    stats: NormStats, how: Normalization, *, command: str, threshold: float = NARROW_RANGE
) -> list[str]:
    """One line for each constant or nearly constant dimension, with what normalising makes of it.

    Args:
        stats: the statistics.
        how: quantiles or z-score.
        command: what computes the statistics anew.
        threshold: a range below it is narrow.
    """
    return [
        f"{key} dimension {i} {_fate(of_key, how, i)} Put a floor under it: {command} --min-{kind}-range 1"
        for key, kind, of_key in (("state", "state", stats.state), ("actions", "action", stats.actions))
        for i, width in enumerate(widths(of_key, how))
        if width < threshold
    ]


def _fate(stats: Statistics, how: Normalization, i: int) -> str:
    """What becomes of a narrow dimension."""
    _, scale = _affine(stats, how, len(stats.mean))
    factor = (2 if how == "quantile" else 1) / scale[i]
    value, blown_up = stats.mean[i], f"becomes {_OUTLIER * factor:.3g}"
    if stats.std[i] <= _ROUNDING * abs(value):
        return (
            f"is constant ({value:.6g} in every frame): it becomes {-1 if how == 'quantile' else 0} in every sample. "
            f"That harms no training, but a value that differs by {_OUTLIER:g} in other data {blown_up}."
        )
    return (
        f"is nearly constant: its range from the 1 % to the 99 % quantile is {widths(stats, how)[i]:.3g} (below "
        f"{NARROW_RANGE:g}), so normalising multiplies it by {factor:.3g}: noise fills the range of a signal, and a "
        f"value {_OUTLIER:g} outside of it {blown_up} and rules the loss. Right only for a signal so small."
    )


def with_min_range(stats: Statistics, min_range: float) -> Statistics:
    """Widens q01..q99 around its middle, and std, so that no dimension's range is below `min_range`."""
    q01, q99 = _quantiles(stats)
    missing = np.maximum(min_range - (q99 - q01), 0.0) / 2
    std = np.maximum(stats.std, min_range / GAUSS_WIDTH)
    return Statistics(mean=stats.mean, std=std, q01=q01 - missing, q99=q99 + missing)


def _affine(stats: Statistics, how: Normalization, dims: int) -> tuple[np.ndarray, np.ndarray]:
    low, scale = stats.mean, stats.std
    if how == "quantile":
        q01, q99 = _quantiles(stats)
        low, scale = q01, q99 - q01
    if len(low) < dims:
        raise UserError(
            f"The normalisation statistics have {len(low)} dimensions, but the data has {dims}. They belong to another "
            "robot: compute them for this dataset with scripts/compute_norm_stats.py"
        )
    return low[:dims], scale[:dims] + EPSILON


def _quantiles(stats: Statistics) -> tuple[np.ndarray, np.ndarray]:
    if stats.q01 is None or stats.q99 is None:
        raise UserError(
            "The normalisation statistics hold no q01 and q99, which --data.normalization=quantile needs. "
            "Compute them with scripts/compute_norm_stats.py"
        )
    return stats.q01, stats.q99


def _statistics(content: Mapping[str, Any]) -> Statistics:
    arrays = {
        name: None if content.get(name) is None else np.asarray(content[name], np.float64)
        for name in ("mean", "std", "q01", "q99")
    }
    mean, std, q01, q99 = (arrays[name] for name in ("mean", "std", "q01", "q99"))
    if mean is None or std is None:
        raise ValueError("mean or std is missing")
    for name, array in arrays.items():
        if array is not None and (array.ndim != 1 or array.shape != mean.shape or not np.isfinite(array).all()):
            raise ValueError(f"{name} is not a list of {mean.size} finite numbers")
    return Statistics(mean=mean, std=std, q01=q01, q99=q99)


def _computed_for(record: Mapping[str, Any]) -> ComputedFor:
    # A later version may record more; what it adds must not make the file unreadable.
    known = {field.name for field in dataclasses.fields(ComputedFor)}
    return ComputedFor(**{name: value for name, value in record.items() if name in known})
