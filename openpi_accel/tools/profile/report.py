"""A profile as tables and as JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from openpi_accel.sizes import format_bytes
from openpi_accel.tools.profile.sizes import Memory, Traffic
from openpi_accel.tools.profile.stages import FETCH, OPTIMIZER, TO_DEVICE, TOLERANCE, Stages
from openpi_accel.tools.profile.switches import Effect


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything that was measured.

    Attributes:
        settings: what was run, on what.
        batch_size: samples per step.
        stages: the five stages.
        memory: of each device, by kind.
        peak_memory_gib: as the log has it.
        traffic: bytes moved per step.
        effects: switches that are off, measured or not.
    """

    settings: Mapping[str, Any]
    batch_size: int
    stages: Stages
    memory: Memory
    peak_memory_gib: Mapping[str, float]
    traffic: Traffic
    effects: Sequence[Effect]


def as_json(profile: Profile) -> dict[str, Any]:
    """Plain values."""
    stages = profile.stages
    return dataclasses.asdict(profile) | {
        "sum_of_stages_s": stages.sum_s,
        "gap_s": stages.gap_s,
        "adds_up": stages.adds_up,
        "bound_by": stages.bound_by.name,
        "samples_per_s": profile.batch_size / stages.loop.step_s,
    }


def print_profile(profile: Profile, console: Console) -> None:
    """The tables, then what bounds the run and what would help."""
    stages = profile.stages
    whole_s = stages.loop.step_s
    table = Table("stage", "alone, ms", "exposed, ms", "share of step", "bytes moved")
    for stage in stages.stages:
        moved = "" if stage.moved_bytes is None else f"{format_bytes(stage.moved_bytes)} {stage.moved}"
        table.add_row(
            stage.name, f"{1e3 * stage.alone_s:.2f}", f"{1e3 * stage.exposed_s:.2f}",
            f"{100 * stage.exposed_s / whole_s:.1f} %", moved,
        )  # fmt: skip
    table.add_section()
    table.add_row("sum", "", f"{1e3 * stages.sum_s:.2f}", f"{100 * stages.sum_s / whole_s:.1f} %", "")
    table.add_row("step of the loop", "", f"{1e3 * whole_s:.2f}", "100 %", "")
    console.print(table)
    for stage in stages.stages:
        console.print(f"{stage.name}: {stage.how}")
    console.print(
        f"the step alone: {1e3 * stages.step_alone_s:.2f} ms; optimizer, average and norms as a program of their own: "
        f"{1e3 * stages.update_alone_s:.2f} ms"
    )
    _print_sum(stages, console)
    _print_memory(profile, console)
    collectives = profile.traffic.collectives
    if collectives is None:
        console.print("collectives: the compiled program could not be read")
    elif collectives:
        sent = ", ".join(f"{kind} {format_bytes(number)}" for kind, number in collectives.items())
        console.print(f"collectives, sent by a device per step: {sent}")
    console.print(f"throughput of the loop: {profile.batch_size / whole_s:.2f} samples/s")
    _print_bound(profile, console)


def _print_sum(stages: Stages, console: Console) -> None:
    gap = f"{1e3 * abs(stages.gap_s):.2f} ms ({100 * abs(stages.gap_s) / stages.loop.step_s:.1f} %)"
    if stages.adds_up:
        console.print(f"the stages add up to the loop's step within {100 * TOLERANCE:.0f} %: {gap} apart")
    else:
        side = "more" if stages.gap_s > 0 else "less"
        console.print(
            f"NOT within {100 * TOLERANCE:.0f} %: the loop's step takes {gap} {side} than the stages add up to. Where "
            "host and devices share cores, the loader slows the step; other work on the machine shows here too."
        )
    for stage in stages.stages:
        if stage.exposed_s < 0:
            console.print(f"{stage.name} came out negative: it is below what these measurements can tell")


def _print_memory(profile: Profile, console: Console) -> None:
    memory = profile.memory
    kinds = [("parameters", memory.parameters), ("optimizer", memory.optimizer), ("average", memory.average)]
    kinds += [("batch", memory.batch)]
    if memory.temporaries is not None:
        kinds.append(("within the step", memory.temporaries))
    console.print("memory of a device: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds))
    peaks = [
        f"{name.removesuffix('_gib').replace('_', ' ')} {gib:.2f} GiB" for name, gib in profile.peak_memory_gib.items()
    ]
    console.print(", ".join(peaks) + " (of this measurement, which holds a second gradient)")


def _print_bound(profile: Profile, console: Console) -> None:
    stages = profile.stages
    bound = stages.bound_by
    console.print(f"\nmost of the step is {bound.name} ({100 * bound.exposed_s / stages.loop.step_s:.0f} %)")
    part = "loader" if bound.name == FETCH else "step"
    effects = sorted(profile.effects, key=lambda effect: effect.part != part)
    if bound.name == FETCH:
        console.print("more --num-workers help as long as there are cores; --data.packed decodes once for all epochs")
    elif bound.name == TO_DEVICE:
        console.print("leaving masked cameras out (OPENPI_SKIP_IMAGES) moves and augments fewer pictures")
    elif bound.name == OPTIMIZER:
        console.print("a larger --batch-size spreads the update over more samples; no switch speeds it up")
    if not effects:
        console.print("every switch that applies to this run is on")
        return
    console.print("off here:")
    for effect in effects:
        console.print(f"  {effect.switch}: {_effect(effect)}. {effect.what}")
    if all(effect.before_s is None and not effect.problem for effect in effects):
        console.print("--measure-switches measures each of them here")


def _effect(effect: Effect) -> str:
    if effect.before_s is None or effect.after_s is None:
        return effect.problem or "not measured"
    before, after = 1e3 * effect.before_s, 1e3 * effect.after_s
    return f"{effect.part} {before:.2f} -> {after:.2f} ms ({before / after:.2f} times as fast)"
