"""The command that computes the statistics of a run, for messages."""

import os
import shlex

from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import TrainConfig


def stats_command(config: TrainConfig, root: str | os.PathLike[str] | None = None) -> str:
    """`python scripts/compute_norm_stats.py …` with every option by which the statistics of this run differ.

    Args:
        config: as the run uses it.
        root: dataset folder, where it is known.
    """
    preset = get_preset(config.name)
    options = {
        "--data.repo-id": (config.data.repo_id, preset.data.repo_id),
        "--data.asset-id": (config.data.asset_id, preset.data.asset_id),
        "--data.state-key": (config.data.state_key, preset.data.state_key),
        "--data.action-key": (config.data.action_key, preset.data.action_key),
        "--data.delta-action-dims": (config.data.delta_action_dims, preset.data.delta_action_dims),
        "--data.normalization": (config.data.normalization, preset.data.normalization),
        "--model.action-horizon": (config.model.action_horizon, preset.model.action_horizon),
        "--data.keep-frames": (config.data.keep_frames, preset.data.keep_frames),
        "--assets-base-dir": (config.assets_base_dir, preset.assets_base_dir),
    }
    words = ["python", "scripts/compute_norm_stats.py", f"--config-name={config.name}"]
    words.append(f"--data.path={root or config.data.path or 'DATASET_FOLDER'}")
    words += [f"{option}={value}" for option, (value, default) in options.items() if value != default]
    if config.data.episodes is not None:
        words += ["--data.episodes", *map(str, config.data.episodes)]
    return shlex.join(words)
