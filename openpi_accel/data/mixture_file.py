"""The file that lists the datasets of a mixture (--data.mixture)."""

import dataclasses
import difflib
import json
import pathlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from openpi_accel.config.schema import CAMERA_SLOTS, LOCAL_REPO_ID, CameraKeys, DataConfig
from openpi_accel.errors import UserError

_EXAMPLE = '{"parts": [{"path": "lift", "weight": 3}, {"path": "pour", "weight": 1, "default_prompt": "pour the tea"}]}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One dataset of a mixture.

    Attributes:
        name: for messages and logs; no two parts share one.
        weight: positive; its share of the samples is weight over the sum of all weights.
        data: as if the part were trained on alone.
    """

    name: str
    weight: Fraction
    data: DataConfig


def read_mixture(path: str | pathlib.Path, base: DataConfig) -> tuple[MixturePart, ...]:
    """Reads the file: an object with a list `parts`, each an object with a `weight`, a `path` or `repo_id`, and
    optionally a `name` and further fields of DataConfig. Relative paths are relative to the file's folder.

    Args:
        path: the file.
        base: the run's; gives the fields that a part does not name.

    Raises:
        UserError: no such file, unknown fields (suggests the nearest), weights that are not positive numbers, or values
            of the wrong kind.
    """
    path = pathlib.Path(path).expanduser()
    try:
        content = json.loads(path.read_text(), parse_float=Fraction)
    except OSError as error:
        raise UserError(f"--data.mixture: {path} could not be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}). It should look like {_EXAMPLE}") from error
    if not isinstance(content, dict) or not isinstance(content.get("parts"), list) or not content["parts"]:
        raise UserError(f'{path} lists no datasets under "parts". It should look like {_EXAMPLE}')
    _refuse_unknown(content, ("parts",), str(path))
    parts = [_part(entry, f"{path}, part {number}", path.parent, base) for number, entry in enumerate(content["parts"])]
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f'{path}: {names.count(name)} parts are called {name!r}. Give each a "name" of its own.')
    return tuple(parts)


def part_named(parts: tuple[MixturePart, ...], name: str | None, option: str) -> MixturePart:
    """The part of that name.

    Raises:
        UserError: no name, or none of the parts'; `option` is how to give it.
    """
    for part in parts:
        if part.name == name:
            return part
    what = "The run trained on a mixture" if name is None else f"No part of the mixture is called {name!r}"
    raise UserError(f"{what}: name one of its parts with {option}: {', '.join(part.name for part in parts)}.")


def _part(entry: Any, where: str, folder: pathlib.Path, base: DataConfig) -> MixturePart:
    if not isinstance(entry, dict):
        raise UserError(f"{where} is {entry!r}, not an object. The file should look like {_EXAMPLE}")
    _refuse_unknown(entry, ("name", "weight", *_READ), where)
    weight = entry.get("weight")
    if not isinstance(weight, int | Fraction) or isinstance(weight, bool) or weight <= 0:
        said = "no weight" if weight is None else f"the weight {_shown(weight)}"
        raise UserError(f"{where} has {said}; it must be a number above 0, for example 1. Leave a part out to drop it.")
    fields = {}
    for field, value in entry.items():
        if field not in _READ or value is None:
            continue
        expected, read = _READ[field]
        try:
            fields[field] = read(value)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: {field} is {_shown(value)}; it must be {expected}.") from error
    if not {"path", "repo_id"} & fields.keys():
        raise UserError(f'{where} names no dataset. Give it a "path" (a folder) or a "repo_id" (a name on the Hub).')
    for field in ("path", "keep_frames", "packed"):
        if field in fields:
            fields[field] = str(folder / pathlib.Path(fields[field]).expanduser())
    name = entry.get("name", pathlib.PurePath(fields["path"]).name if "path" in fields else fields["repo_id"])
    if not isinstance(name, str) or not name:
        raise UserError(f"{where}: name is {_shown(name)}; it must be a text.")
    data = dataclasses.replace(base, **({"mixture": None, "repo_id": LOCAL_REPO_ID} | fields))
    return MixturePart(name=name, weight=Fraction(weight), data=data)


def _refuse_unknown(entry: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for field in entry:
        if field not in known:
            close = difflib.get_close_matches(field, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known are {', '.join(known)}."
            raise UserError(f"{where} has an unknown field {field!r}. {hint}")


def _shown(value: Any) -> str:
    return f"{float(value):g}" if isinstance(value, Fraction) else repr(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError
    return value


def _share(value: Any) -> float:
    if not isinstance(value, int | Fraction) or isinstance(value, bool) or not 0 <= value < 1:
        raise TypeError
    return float(value)


def _normalization(value: Any) -> str:
    if value not in ("quantile", "zscore"):
        raise ValueError
    return str(value)


def _episodes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(_count(number) for number in value)


def _cameras(value: Any) -> CameraKeys:
    if not isinstance(value, dict):
        raise TypeError
    _refuse_unknown(value, CAMERA_SLOTS, "cameras")
    return CameraKeys(**{slot: _text(key) for slot, key in value.items() if key is not None})


_READ: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "path": ("a folder", _text),
    "repo_id": ("a name on the Hub", _text),
    "asset_id": ("a folder below assets/<config>", _text),
    "cameras": (f"an object such as {{{CAMERA_SLOTS[0]!r}: 'observation.images.top'}}", _cameras),
    "state_key": ("the name of a column", _text),
    "action_key": ("the name of a column", _text),
    "default_prompt": ("a text", _text),
    "delta_action_dims": ("a whole number, 0 or more", _count),
    "normalization": ("'quantile' or 'zscore'", _normalization),
    "episodes": ("a list of episode numbers", _episodes),
    "keep_frames": ("a file", _text),
    "val_fraction": ("a number of at least 0 and below 1", _share),
    "packed": ("a folder", _text),
}
