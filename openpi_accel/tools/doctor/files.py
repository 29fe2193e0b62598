"""Where checkpoints go, and what a run reads. JAX is imported for the base weights alone."""

import errno
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from openpi_accel.config.environment import Environment
from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import TrainConfig
from openpi_accel.data.lerobot.dataset import open_dataset
from openpi_accel.data.lerobot.features import read_info
from openpi_accel.data.lerobot.locate import find_dataset
from openpi_accel.data.norm_stats import load_norm_stats, norm_stats_path
from openpi_accel.data.stats_command import stats_command
from openpi_accel.data.tokenizer import PromptTokenizer, find_tokenizer
from openpi_accel.errors import UserError
from openpi_accel.sizes import format_bytes
from openpi_accel.tools.doctor.finding import Finding, Level
from openpi_accel.tools.doctor.limits import GIB, DiskUsage

# Of pi0.5 in full: float32 parameters, and with an average the raw ones and Adam's two moments besides.
FULL_PARAMS_GIB = 12.5
_COPIES, _COPIES_WITHOUT_AVERAGE = 4, 3
_SIZES = ("paligemma_variant", "action_expert_variant", "vision_variant")


def stated_checkpoint_gib(config: TrainConfig | None) -> float | None:
    """Size of a checkpoint by the constant above; None for a model of other sizes. Frozen parts only lessen it."""
    if config is None:
        return _COPIES * FULL_PARAMS_GIB
    full = get_preset("pi05_libero").model
    if any(getattr(config.model, name) != getattr(full, name) for name in _SIZES):
        return None
    return (_COPIES if config.ema_decay is not None else _COPIES_WITHOUT_AVERAGE) * FULL_PARAMS_GIB


def checkpoint_folder(folder: pathlib.Path) -> Finding:
    """Whether checkpoints can be written there: makes a nameless file in it, or in the nearest folder above."""
    nearest = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = "Choose another folder with --checkpoint-base-dir, or mend its permissions or space."
        return Finding(name="checkpoint folder", level="error", seen=f"{nearest}: {reason}", advice=advice)
    seen = f"{folder} can be written" if nearest == folder else f"{folder} can be made in {nearest}"
    return Finding(name="checkpoint folder", level="ok", seen=seen)


def free_disk(folder: pathlib.Path, disk_usage: DiskUsage, checkpoint_gib: float | None, *, exact: bool) -> Finding:
    """Free space against one checkpoint; while one is saved its predecessor is still there.

    Args:
        folder: of the checkpoints; need not be there.
        disk_usage: as shutil.disk_usage.
        checkpoint_gib: of one checkpoint; None is unknown.
        exact: it was computed from the run's own model, so that too little space is certain to fail.
    """
    free = disk_usage(_nearest(folder)).free / GIB
    seen = f"{format_bytes(free * GIB)} free"
    if checkpoint_gib is None:
        return Finding(
            name="free disk", level="ok", seen=f"{seen} (the model's size is computed without --quick alone)"
        )
    seen += f", one checkpoint takes {format_bytes(checkpoint_gib * GIB)}"
    if free >= 2 * checkpoint_gib:
        return Finding(name="free disk", level="ok", seen=seen)
    advice = "Room for two is needed: the older checkpoint goes when the newer one is complete. Free some, or choose "
    advice += "another folder with --checkpoint-base-dir."
    level: Level = "error" if exact and free < checkpoint_gib else "warning"
    return Finding(name="free disk", level=level, seen=seen, advice=advice)


def dataset(config: TrainConfig, environment: Environment, *, quick: bool) -> Finding:
    """Whether the dataset is there; without `quick` it is opened too."""

    def look() -> str:
        root = find_dataset(config.data.repo_id, config.data.path, environment)
        if quick:
            return f"{root}: LeRobot {read_info(root).version}"
        opened = open_dataset(root)
        return f"{root}: LeRobot {opened.version}, {opened.num_episodes} episodes, {opened.num_frames} frames"

    return _found("dataset", look)


def tokenizer(config: TrainConfig, environment: Environment) -> Finding:
    """Whether the tokenizer is there and belongs to the model."""

    def look() -> pathlib.Path:
        path = find_tokenizer(config.data.tokenizer_path, environment)
        PromptTokenizer(path, max_token_len=None, vocab_size=config.model.vocab_size)
        return path

    return _found("tokenizer", look)


def norm_statistics(config: TrainConfig) -> Finding:
    """Whether the normalisation statistics are there and readable."""

    def look() -> pathlib.Path:
        path = norm_stats_path(config.assets_base_dir, config.name, config.asset_id)
        load_norm_stats(path, command=stats_command(config))
        return path

    return _found("norm statistics", look)


def base_weights(config: TrainConfig, environment: Environment) -> Finding:
    """Whether the base weights are there, where the run needs them."""
    if config.weight_loader.params_path is None or config.resume:
        why = "not needed: the run is resumed" if config.resume else "none wanted: fresh weights"
        return Finding(name="base weights", level="ok", seen=why)
    # With JAX and Orbax behind it, this import takes longer than all quick checks together.
    from openpi_accel.build.files import base_weights

    return _found("base weights", lambda: base_weights(config, environment))


def _found(name: str, look: Callable[[], Any]) -> Finding:
    """What training itself would say, before it starts."""
    try:
        return Finding(name=name, level="ok", seen=str(look()))
    except UserError as error:
        return Finding(name=name, level="error", seen="not usable, so training would not start", advice=str(error))


def _nearest(folder: pathlib.Path) -> pathlib.Path:
    """The folder, or the nearest one above it that is there."""
    for candidate in (folder, *folder.parents):
        try:
            if candidate.stat():
                return candidate
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                return candidate  # whoever writes there learns why it cannot be looked at
    return folder
