"""Which accelerations are off and would serve this run, and what each does to the step or to the loader."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from openpi_accel.accel.catalog import CATALOG, Entry, switched_on
from openpi_accel.build.data import Data
from openpi_accel.build.mixture import Mixture
from openpi_accel.build.training import build_training
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig
from openpi_accel.parallel.sharding import batch_sharding
from openpi_accel.tools.profile.programs import Programs, median, time_in_turns
from openpi_accel.tools.profile.real_loop import time_loader
from openpi_accel.train.loop import compile_ahead
from openpi_accel.train.memory import device_limit, step_memory

# Of the data plane: the switch, and what it does.
DATA_SWITCHES: tuple[tuple[str, str], ...] = (
    ("OPENPI_SKIP_VIDEO_DECODE=1", "decodes only the cameras that the model takes"),
    ("OPENPI_WORKER_CPU=1", "data workers are processes, on cores away from the trainer's"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """A switch that is off.

    Attributes:
        switch: what the user writes.
        what: what it does.
        part: "step", or "loader".
        before_s, after_s: seconds per batch of that part, without and with it, taken in turns; None where not measured.
        problem: why it could not be measured; empty where it could.
    """

    switch: str
    what: str
    part: str
    before_s: float | None = None
    after_s: float | None = None
    problem: str = ""


def missing_step_switches(config: TrainConfig, acceleration: Acceleration) -> list[Entry]:
    """Rows of the catalogue that are off, that run_opt.sh would turn on, and that apply to this run."""
    return [entry for entry in CATALOG if entry.in_opt and _is_off(entry, config, acceleration)]


def missing_data_switches(acceleration: Acceleration) -> list[tuple[str, str]]:
    """Those of DATA_SWITCHES that are off."""
    return [(switch, what) for switch, what in DATA_SWITCHES if _with_data_switch(acceleration, switch) != acceleration]


def _with_data_switch(acceleration: Acceleration, switch: str) -> Acceleration:
    return Acceleration.from_env(dict([switch.split("=")]), acceleration)


def _is_off(entry: Entry, config: TrainConfig, acceleration: Acceleration) -> bool:
    if "skip_images" in entry.fields:
        filled = config.data.cameras.as_dict()
        return not acceleration.skip_images and not set(entry.fields["skip_images"]) & set(filled)
    if "flash_attn" in entry.fields:
        return not acceleration.flash_attn
    if "remat.gemma" in entry.options:
        return "full" in (config.remat.gemma, config.remat.siglip)
    return switched_on(entry, config, acceleration) != (config, acceleration)


def measure_step_switches(
    config: TrainConfig,
    acceleration: Acceleration,
    mesh: Mesh,
    programs: Programs,
    host_batch: Any,
    repeats: int,
    say: Callable[[str], object],
) -> Iterator[Effect]:
    """Yields every missing switch with its measured effect, each alone, and at last all of them together."""
    missing = missing_step_switches(config, acceleration)
    cases = [(entry.switch, entry.candidate, [entry]) for entry in missing]
    if len(missing) > 1:
        cases.append(("all of these", "every switch above at once", missing))
    for switch, what, entries in cases:
        say(f"measuring {switch}")
        chosen = config, acceleration
        for entry in entries:
            chosen = switched_on(entry, *chosen)
        yield _measure(Effect(switch=switch, what=what, part="step"), chosen, mesh, programs, host_batch, repeats)


def _measure(
    effect: Effect,
    chosen: tuple[TrainConfig, Acceleration],
    mesh: Mesh,
    programs: Programs,
    host_batch: Any,
    repeats: int,
) -> Effect:
    training = build_training(*chosen, mesh)
    batch = jax.device_put(_without(host_batch, chosen[1].skip_images), batch_sharding(mesh))
    step = compile_ahead(training.step, mesh, training.abstract, batch, training.train_rng)
    need, limit = step_memory(step), device_limit(jax.local_devices()[0])
    if need is not None and limit is not None and need.total > limit:
        return dataclasses.replace(effect, problem=f"does not fit the device: needs {need}")
    times = time_in_turns({"before": programs.run_step, "after": lambda: programs.run_other(step, batch)}, repeats)
    return dataclasses.replace(effect, before_s=median(times["before"]), after_s=median(times["after"]))


def _without(batch: Any, slots: tuple[str, ...]) -> Any:
    def kept(values: dict[str, Any]) -> dict[str, Any]:
        return {slot: value for slot, value in values.items() if slot not in slots}

    observation = batch.observation
    return dataclasses.replace(
        batch,
        observation=dataclasses.replace(
            observation, images=kept(observation.images), image_masks=kept(observation.image_masks)
        ),
    )


def measure_data_switches(
    data: Data | Mixture,
    acceleration: Acceleration,
    rebuild: Callable[[Acceleration], Data | Mixture],
    num_batches: int,
    say: Callable[[str], object],
) -> Iterator[Effect]:
    """Yields every missing switch of the data plane with its effect on the loader alone."""
    for switch, what in missing_data_switches(acceleration):
        say(f"measuring {switch}")
        before_s = time_loader(data, num_batches)
        other = rebuild(_with_data_switch(acceleration, switch))
        after_s = time_loader(other, num_batches)
        yield Effect(switch=switch, what=what, part="loader", before_s=before_s, after_s=after_s)
