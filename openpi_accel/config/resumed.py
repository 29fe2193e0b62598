"""A resumed run goes by its own config.json: what its user does not give again is as it was."""

import dataclasses
import json
import os
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import TrainConfig
from openpi_accel.config.serialize import CONFIG_FILE, from_json, to_json
from openpi_accel.errors import UserError

_OF_THE_START = ("--resume", "--overwrite", "--checkpoint-base-dir")
_SWITCHES = {"--resume": True, "--no-resume": False}


def saved_options(preset: TrainConfig, argv: Sequence[str]) -> TrainConfig | None:
    """The config of the run that these options resume; None where they resume none, or it has no config.json.

    Args:
        preset: the named config, which says where runs lie if the options do not.
        argv: the options.

    Raises:
        UserError: the file is damaged, or of another version of this project.
    """
    words = [word.replace("_", "-") if word.startswith("--") else word for word in argv]
    resume = next((_SWITCHES[word] for word in reversed(words) if word in _SWITCHES), False)
    exp_name = _value("--exp-name", argv)
    if not resume or not exp_name:
        return None
    base = _value("--checkpoint-base-dir", argv) or preset.checkpoint_base_dir
    file = pathlib.Path(base).expanduser() / preset.name / exp_name / CONFIG_FILE
    if not file.is_file():
        return None
    try:
        saved = from_json(file.read_text(), str(file))
    except UserError as error:
        raise UserError(f"{error} Move it away to resume by the options that you give alone.") from error
    # A run's folder may have been moved since.
    return dataclasses.replace(saved, name=preset.name, exp_name=exp_name, checkpoint_base_dir=base)


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The config to write into the run's folder: it holds from wherever the run is resumed."""
    data = {name: _absolute(getattr(config.data, name)) for name in ("path", "tokenizer_path", "keep_frames", "packed")}
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, **data),
        assets_base_dir=_absolute(config.assets_base_dir),
        checkpoint_base_dir=_absolute(config.checkpoint_base_dir),
    )


def _absolute(path: str | None) -> Any:
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def changed_options(file: pathlib.Path, config: TrainConfig) -> list[str]:
    """`--option value (was other)` for all that differs from a run's config.json; nothing where there is none."""
    if not file.is_file():
        return []
    old, new = (_flat(json.loads(text)) for text in (file.read_text(), to_json(with_absolute_paths(config))))
    changed = [name for name in new if name not in _OF_THE_START and new[name] != old.get(name)]
    return [f"{name} {new[name]} (was {old.get(name)})" for name in changed]


def resume_command(config: TrainConfig, script: str) -> str:
    """What to type to go on with a run; everything else is in its config.json."""
    words = ["python", script, config.name, f"--exp-name={config.exp_name}", "--resume"]
    if config.checkpoint_base_dir != get_preset(config.name).checkpoint_base_dir:
        words.append(f"--checkpoint-base-dir={config.checkpoint_base_dir}")
    return shlex.join(words)


def _value(option: str, argv: Sequence[str]) -> str | None:
    """The last value of an option, in any of the spellings that tyro takes."""
    found = None
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            found = value if equals else next(iter(argv[i + 1 : i + 2]), None)
    return found


def _flat(values: dict[str, object], above: str = "--") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in values.items():
        path = above + name.replace("_", "-")
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat
