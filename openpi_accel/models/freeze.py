"""Which parameters train: presets and regular expressions over parameter paths, and a table of what they select."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from openpi_accel.config.schema import Architecture
from openpi_accel.errors import UserError
from openpi_accel.tree import flatten

IsTrainable = Callable[[str], bool]

_LLM, _VISION = "PaliGemma/llm/", "PaliGemma/img/"
# A folder of the second expert: q_einsum_1, mlp_1, pre_ffw_norm_1, final_norm_1.
_ACTION_EXPERT = re.compile(r"PaliGemma/llm/.*_1(/|$)")
PRESETS = ("auto", "none", "lora", "vision", "llm", "all_but_action_expert")


def trainable_predicate(spec: str, params: Mapping[str, Any], arch: Architecture) -> IsTrainable:
    """Whether the leaf of a path ("a/b/c") trains.

    Args:
        spec: what is frozen. none: nothing. lora: of every expert with adapters all but the adapters (of the other
            expert nothing), as upstream does. vision: the vision tower. llm: the first expert and the embedding.
            all_but_action_expert: the vision tower and the first expert; the action expert and the projections train.
            auto: lora where an expert has adapters, else none. Anything else is a regular expression that must match
            the whole path of every leaf to be frozen.
        params: the parameter tree, or its shapes.
        arch: tells which expert has adapters.

    Raises:
        UserError: a filter that matches nothing or everything, lora without adapters, a broken expression.
    """
    has_lora = (arch.paligemma.lora is not None, arch.action_expert.lora is not None)
    if spec == "auto":
        spec = "lora" if any(has_lora) else "none"
    if spec == "none":
        return lambda path: True
    if spec == "lora" and not any(has_lora):
        raise UserError(
            "--freeze=lora, but neither expert has adapters. Choose --model.paligemma-variant or "
            "--model.action-expert-variant with a name that ends in _lora, or --freeze=none."
        )
    is_frozen = _frozen(spec, has_lora)
    paths = list(flatten(params))
    num_frozen = sum(map(is_frozen, paths))
    if num_frozen in (0, len(paths)):
        amount = "no parameter" if num_frozen == 0 else "every parameter"
        raise UserError(
            f"--freeze={spec} matches {amount} of this model, so it cannot be meant. It is one of "
            f"{', '.join(PRESETS)}, or a regular expression over whole paths such as {paths[0]}, for example .*/img/.*"
        )
    return lambda path: not is_frozen(path)


def _frozen(spec: str, has_lora: tuple[bool, bool]) -> Callable[[str], bool]:
    def expert(path: str) -> int:
        return int(_ACTION_EXPERT.match(path) is not None)

    def first_expert(path: str) -> bool:
        return path.startswith(_LLM) and expert(path) == 0

    presets: dict[str, Callable[[str], bool]] = {
        "lora": lambda path: path.startswith(_LLM) and "lora" not in path and has_lora[expert(path)],
        "vision": lambda path: path.startswith(_VISION),
        "llm": first_expert,
        "all_but_action_expert": lambda path: path.startswith(_VISION) or first_expert(path),
    }
    if spec in presets:
        return presets[spec]
    try:
        pattern = re.compile(spec)
    except re.error as error:
        raise UserError(
            f"--freeze={spec} is neither one of {', '.join(PRESETS)} nor a regular expression ({error})."
        ) from error
    return lambda path: pattern.fullmatch(path) is not None


@dataclasses.dataclass(frozen=True)
class ModuleCount:
    """Parameter counts of one module."""

    module: str
    trainable: int
    total: int


def count_parameters(params: Mapping[str, Any], is_trainable: IsTrainable) -> list[ModuleCount]:
    """Counts per module, in the order of the data's way, and a last row `total`. `params` may be shapes."""
    rows: dict[str, list[int]] = {}
    for path, leaf in flatten(params).items():
        size = int(leaf.size)
        for module in (_module_of(path), "total"):
            row = rows.setdefault(module, [0, 0])
            row[0] += size if is_trainable(path) else 0
            row[1] += size
    order = ["vision tower", "token embedding", "first expert", "action expert", "projections", "adapters", "total"]
    return [ModuleCount(module, *rows[module]) for module in order if module in rows]


def _module_of(path: str) -> str:
    if path.startswith(_VISION):
        return "vision tower"
    if not path.startswith(_LLM):
        return "projections"
    if path.endswith("input_embedding"):
        return "token embedding"
    if "lora" in path:
        return "adapters"
    return "action expert" if _ACTION_EXPERT.match(path) else "first expert"


def format_counts(counts: list[ModuleCount]) -> str:
    """A table for the terminal: module, trainable and all parameters."""
    lines = [f"{'module':<16}{'trainable':>16}{'parameters':>16}"]
    lines += [f"{c.module:<16}{c.trainable:>16,}{c.total:>16,}" for c in counts]
    return "\n".join(lines)
