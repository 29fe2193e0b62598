"""TrainConfig <-> JSON, so that a run folder says what it was trained with and other tools can read it back."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from openpi_accel.config.schema import TrainConfig
from openpi_accel.errors import UserError

# In the run's folder: the config, and what else its figures depend on (switches, JAX, devices).
CONFIG_FILE = "config.json"
ENVIRONMENT_FILE = "environment.json"


def to_json(config: TrainConfig) -> str:
    """Every field, nested as in the dataclasses."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, source: str) -> TrainConfig:
    """The inverse of `to_json`; `source` names the file in messages. Fields that a newer version added take defaults.

    Raises:
        UserError: no JSON, or no config of this project.
    """
    try:
        values = json.loads(text)
        return _build(TrainConfig, values)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{source} does not hold a training config of this project ({error}).") from error


def _build(cls: type, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    unknown = set(values) - set(hints)
    if unknown:
        raise UserError(f"unknown fields {sorted(unknown)} in {cls.__name__}; it was written by another version.")
    return cls(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if isinstance(value, Mapping):
        return _build(next(option for option in options if dataclasses.is_dataclass(option)), value)  # type: ignore[arg-type]
    return tuple(value) if isinstance(value, list) else value
