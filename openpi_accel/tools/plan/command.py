"""Does a training step fit a GPU, and what is the nearest setting that does? Nothing runs on a GPU, and none needs to
be there: lifetimes of values in the traced step are added up.

The settings are those of run_opt.sh (--baseline: of run_baseline.sh); options of scripts/train.py and OPENPI_ switches
win over them. Further: --gpus N in all, --gpu-memory-gib N (default: a table for 24, 48, 80, 96 and 141),
--memory-fraction F, the part of a card that JAX may use, --json.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig
from openpi_accel.errors import UserError
from openpi_accel.parallel.mesh import check_batch_size
from openpi_accel.tools.opt_settings import ASSUMED_PROMPT, chosen_settings
from openpi_accel.tools.plan.search import MARGIN, Planned, Planner, with_adapters

# GiB of the usual cards by their makers' names; of the H200 what JAX sees.
CARDS = {"24 GB": 24.0, "48 GB": 48.0, "80 GB": 80.0, "96 GB": 96.0, "141 GB": 139.8}
# What the messages of training advise (XLA_PYTHON_CLIENT_MEM_FRACTION).
_FRACTION = 0.95
_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What fits one kind of card.

    Attributes:
        card: its name.
        gpu_memory_gib: of the card.
        usable_gib: what JAX may use of it.
        asked: the setting as asked.
        fits: whether it does, with the margin.
        same_numbers: the nearest setting that fits and leaves the numbers as they are, but for rounding.
        smaller_batch: the largest batch that fits, where no such setting does.
        without_average: likewise, without the averaged parameters, where no batch fits.
        adapters: the nearest setting that trains low-rank adapters; its batch is smaller where it must be.
    """

    card: str
    gpu_memory_gib: float
    usable_gib: float
    asked: Planned
    fits: bool
    same_numbers: Planned | None
    smaller_batch: Planned | None
    without_average: Planned | None
    adapters: Planned | None


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Prints what fits; exit code 1 where the setting asked about fits none of the cards.

    Raises:
        UserError: values that contradict each other.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--gpu-memory-gib", type=float)
    parser.add_argument("--memory-fraction", type=float, default=_FRACTION)
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(argv)
    config, acceleration = chosen_settings(
        rest, env, plain=own.baseline, prog="python scripts/plan.py", description=__doc__ or ""
    )
    if own.gpus < 1 or not 0 < own.memory_fraction <= 1 or (own.gpu_memory_gib or 1) <= 0:
        raise UserError("--gpus must be at least 1, --gpu-memory-gib above 0, --memory-fraction above 0 and at most 1.")
    check_batch_size(config.batch_size, own.gpus)
    if own.gpus % config.fsdp_devices:
        raise UserError(f"--fsdp-devices {config.fsdp_devices} does not divide --gpus {own.gpus}.")
    cards = CARDS if own.gpu_memory_gib is None else {f"{own.gpu_memory_gib:g} GiB": own.gpu_memory_gib}
    answers = [answer(config, acceleration, own.gpus, card, gib, own.memory_fraction) for card, gib in cards.items()]
    if own.json:
        print(json.dumps([_as_json(one, own.gpus) for one in answers]))
    else:
        print(_heading(config, answers[0].asked, own.gpus, own.memory_fraction))
        print("\n".join(line for one in answers for line in _lines(one, own.gpus)))
    return 0 if any(one.fits for one in answers) else 1


def answer(
    config: TrainConfig, acceleration: Acceleration, num_gpus: int, card: str, card_gib: float, fraction: float
) -> Answer:
    """Plans one kind of card.

    Args:
        config: with a fixed prompt length and a batch that the GPUs divide.
        acceleration: what is switched on.
        num_gpus: in all.
        card: name of one.
        card_gib: its memory.
        fraction: of it that JAX may use.
    """
    planner = Planner(acceleration=acceleration, num_devices=num_gpus, limit=int(card_gib * fraction * _GIB))
    asked = planner.plan(config, config)
    same = asked if planner.fits(asked) else planner.same_numbers(config)
    smaller = planner.smaller_batch(config, config) if same is None else None
    plain = dataclasses.replace(config, ema_decay=None)
    without = planner.smaller_batch(plain, config) if same is smaller is None and config != plain else None
    small = with_adapters(config)
    adapters = None
    if small is not None:
        adapters = planner.same_numbers(small, config) or planner.smaller_batch(small, config)
    return Answer(
        card=card,
        gpu_memory_gib=card_gib,
        usable_gib=card_gib * fraction,
        asked=asked,
        fits=planner.fits(asked),
        same_numbers=same,
        smaller_batch=smaller,
        without_average=without,
        adapters=adapters,
    )


def _heading(config: TrainConfig, asked: Planned, num_gpus: int, fraction: float) -> str:
    gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    length = config.model.max_token_len
    assumed = " (assumed; tell it by --model.max-token-len)" if length == ASSUMED_PROMPT else ""
    return (
        f"{config.name} on {gpus}, batch {config.batch_size} ({config.batch_size // num_gpus} per GPU), prompt of "
        f"{length} tokens{assumed}: {asked.need}.\nA setting fits where {MARGIN:.0%} more would fit, too, into the "
        f"{fraction:.0%} of a card that JAX may use: start with XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:g}."
    )


def _lines(one: Answer, num_gpus: int) -> list[str]:
    lines = [f"{one.card}: {'fits as it is' if one.fits else 'does not fit as it is'}"]
    rows = {
        "same training": None if one.fits else one.same_numbers,
        "smaller batch": one.smaller_batch,
        "without the average": one.without_average,
        "adapters": one.adapters,
    }
    lines += [f"  {what:<20}{_described(planned, num_gpus)}" for what, planned in rows.items() if planned is not None]
    if one.same_numbers is one.smaller_batch is one.without_average is None:
        lines.append(
            "  full fine-tuning does not fit at any batch on these GPUs"
            + ("" if num_gpus > 1 else "; --gpus 8 shards it")
        )
    return lines


def _described(planned: Planned, num_gpus: int) -> str:
    batch = planned.config.batch_size
    again = f", {planned.recomputed:.0%} of the products computed twice" if planned.recomputed else ""
    options = " ".join(planned.options) or "as it is"
    return f"{planned.need.total / _GIB:6.1f} GiB  {options}  (batch {batch}, {batch // num_gpus} per GPU{again})"


def _as_json(one: Answer, num_gpus: int) -> dict[str, Any]:
    def row(planned: Planned | None) -> dict[str, Any] | None:
        if planned is None:
            return None
        return {
            "options": [word for option in planned.options for word in option.split()],
            "batch_size": planned.config.batch_size,
            "batch_per_gpu": planned.config.batch_size // num_gpus,
            "state_gib": planned.need.state / _GIB,
            "temporaries_gib": planned.need.temporaries / _GIB,
            "total_gib": planned.need.total / _GIB,
            "recomputed": planned.recomputed,
        }

    return {
        "gpus": num_gpus,
        "card": one.card,
        "gpu_memory_gib": one.gpu_memory_gib,
        "usable_gib": one.usable_gib,
        "margin": MARGIN,
        "fits": one.fits,
        "asked": row(one.asked),
        "same_numbers": row(one.same_numbers),
        "smaller_batch": row(one.smaller_batch),
        "without_average": row(one.without_average),
        "adapters": row(one.adapters),
    }
