"""What a run reads beside the project: is all of it on this machine? Everything that is missing is told at once."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from openpi_accel.config.environment import Environment
from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import TrainConfig
from openpi_accel.data.lerobot.locate import DATASET_OPTION, find_dataset
from openpi_accel.data.norm_stats import load_norm_stats, norm_stats_path
from openpi_accel.data.stats_command import stats_command
from openpi_accel.data.tokenizer import find_tokenizer
from openpi_accel.errors import UserError
from openpi_accel.models.weights import find_params_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileOptions:
    """By which options a tool's user says where things are, for messages.

    Attributes:
        dataset: the dataset's folder.
        tokenizer: the SentencePiece model file.
    """

    dataset: str = DATASET_OPTION
    tokenizer: str = "--data.tokenizer-path"


def base_weights(config: TrainConfig, environment: Environment) -> pathlib.Path | None:
    """The folder of the run's base weights; None for fresh ones.

    Raises:
        UserError: they are not there.
    """
    path = config.weight_loader.params_path
    if path is None:
        return None
    public = get_preset(config.name).weight_loader.params_path
    return find_params_folder(path, environment.openpi_data_home, public=public)


def require_files(
    config: TrainConfig,
    environment: Environment,
    *,
    options: FileOptions | None = None,
    norm_stats_file: pathlib.Path | None = None,
    statistics: bool = True,
    weights: bool = False,
) -> None:
    """Looks whether everything is there that is read before the first step.

    Args:
        config: the run's config.
        environment: where files are looked for.
        options: the tool's own; None is training's.
        norm_stats_file: None is the assets folder's.
        statistics: the normalisation statistics are needed.
        weights: the base weights are needed.

    Raises:
        UserError: names all that is missing, each with what mends it.
    """
    options = options or FileOptions()
    path = norm_stats_file or norm_stats_path(config.assets_base_dir, config.name, config.asset_id)
    data = config.data
    looks: dict[str, Callable[[], Any]] = {
        "dataset": lambda: find_dataset(data.repo_id, data.path, environment, option=options.dataset),
        "tokenizer": lambda: find_tokenizer(data.tokenizer_path, environment, option=options.tokenizer),
    }
    if statistics:
        looks["norm statistics"] = lambda: load_norm_stats(path, command=stats_command(config))
    if weights:
        looks["base weights"] = lambda: base_weights(config, environment)
    problems: dict[str, UserError] = {}
    for name, look in looks.items():
        try:
            look()
        except UserError as error:
            problems[name] = error
    if len(problems) == 1:
        raise next(iter(problems.values()))
    if problems:
        listed = "\n".join(f"{i}. {name}: {error}" for i, (name, error) in enumerate(problems.items(), 1))
        raise UserError(f"{len(problems)} things are missing; here is what mends each:\n{listed}")
