"""Where a training step's time goes: five stages, what is hidden behind what, bytes and memory, what would help."""

import argparse
import dataclasses
import gzip
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from openpi_accel.build.data import Data, build_data
from openpi_accel.build.mixture import Mixture, build_mixture
from openpi_accel.build.training import build_training
from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig, WeightLoaderConfig
from openpi_accel.errors import UserError
from openpi_accel.parallel.mesh import check_batch_size, make_mesh
from openpi_accel.parallel.sharding import batch_sharding
from openpi_accel.tools import demo
from openpi_accel.tools.bench import HLO_FILE, TRACED_STEPS, random_batch
from openpi_accel.tools.profile.programs import Programs
from openpi_accel.tools.profile.real_loop import (
    NUM_WARMUP,
    LoopTimes,
    real_batches,
    time_loader,
    time_loop,
    time_transfer,
)
from openpi_accel.tools.profile.report import Profile, as_json, print_profile
from openpi_accel.tools.profile.sizes import memory_by_kind, traffic
from openpi_accel.tools.profile.stages import cut_stages
from openpi_accel.tools.profile.switches import (
    Effect,
    measure_data_switches,
    measure_step_switches,
    missing_data_switches,
    missing_step_switches,
)
from openpi_accel.tools.trace_table import describe
from openpi_accel.train.memory import peak_memory_gib

_OWN_OPTIONS = """Further: --random (data on the devices instead of the dataset), --repeats N (timings of each program,
default 5), --steps N (of the short loop, default 10), --measure-switches (the effect of every switch that is off),
--trace DIR (a profiler trace of the loop, for TensorBoard or Perfetto), --json (one line)."""


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """`profile.py CONFIG [train options] [--options]`.

    Raises:
        UserError: no dataset, or what training itself would refuse.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--measure-switches", action="store_true")
    parser.add_argument("--trace", type=pathlib.Path)
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(argv)
    description = f"{__doc__} Takes the options of scripts/train.py. {_OWN_OPTIONS}"
    config = parse_train_config(rest, prog="python scripts/profile.py", description=description)
    if own.repeats < 1 or own.steps < 1:
        raise UserError(f"--repeats is {own.repeats} and --steps {own.steps}; both must be at least 1.")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    progress = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    profile = measure(config, Acceleration.from_env(env), Environment.from_env(env), own, progress.print)
    if own.json:
        print(json.dumps(as_json(profile)))
    else:
        print_profile(profile, console)
    return 0


def measure(
    config: TrainConfig,
    acceleration: Acceleration,
    environment: Environment,
    own: argparse.Namespace,
    say: Callable[..., object],
) -> Profile:
    """Compiles the programs, times them alone and the loop as it runs, and what the switches do."""
    mesh = make_mesh(config.fsdp_devices)
    check_batch_size(config.batch_size, mesh.size, jax.process_count())
    data: Data | Mixture | None = None
    if own.random:
        host_batch = random_batch(config, acceleration.skip_images)
    else:
        if config.name == demo.CONFIG_NAME and config.data.path is None:
            config, _ = demo.prepare(config, Console(stderr=True, highlight=False))
        data = _open(config, acceleration, environment)
        config = data.config
        with data.loader() as loader:
            host_batch = next(loader).batch
    # Weights do not matter to speed, and public ones need not be on this machine.
    config = dataclasses.replace(config, weight_loader=WeightLoaderConfig())
    sharding = batch_sharding(mesh)
    batch = jax.device_put(host_batch, sharding)
    say("compiling the step and its parts")
    training = build_training(config, acceleration, mesh)
    for note in training.notes:
        say(note)
    programs = Programs(training, training.fresh_state()[0], batch, config.num_microbatches, mesh)
    say("timing each alone")
    times = programs.time(own.repeats)
    programs.drop_gradient()
    fetch_s = None if data is None else time_loader(data, own.steps)
    transfer_s = time_transfer(host_batch, sharding)
    say(f"timing a loop of {own.steps} steps")
    loop = _loop(data, programs, batch, mesh, own.steps)
    memory = peak_memory_gib()
    if own.trace is not None:
        _trace(own.trace, lambda: _loop(data, programs, batch, mesh, TRACED_STEPS), programs.step, say)
    moved = traffic(training, host_batch, programs.step)
    effects = _effects(config, acceleration, environment, mesh, programs, data, host_batch, own, say)
    return Profile(
        settings={
            "config": config.name,
            "batch_size": config.batch_size,
            "data": "random, on the devices"
            if data is None
            else [str(part.source.dataset.root) for part in data.datasets],
            "cameras": list(host_batch.observation.images),
            "prompt_tokens": config.model.max_token_len,
            "dtype": config.model.dtype,
            "remat": dataclasses.asdict(config.remat),
            "num_microbatches": config.num_microbatches,
            "num_workers": config.num_workers,
            "fsdp_devices": config.fsdp_devices,
            "acceleration": dataclasses.asdict(acceleration),
            "num_devices": jax.device_count(),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "repeats": own.repeats,
            "steps": own.steps,
        },
        batch_size=config.batch_size,
        stages=cut_stages(
            times,
            fetch_s=fetch_s,
            transfer_s=transfer_s,
            loop=loop,
            drawn_bytes=programs.drawn_bytes,
            traffic=moved,
        ),
        memory=memory_by_kind(training, batch, programs.step),
        peak_memory_gib=memory,
        traffic=moved,
        effects=effects,
    )


def _open(config: TrainConfig, acceleration: Acceleration, environment: Environment) -> Data | Mixture:
    build = build_data if config.data.mixture is None else build_mixture
    return build(config, acceleration, environment)


def _loop(data: Data | Mixture | None, programs: Programs, batch: Any, mesh: Mesh, num_steps: int) -> LoopTimes:
    if data is None:
        return time_loop(programs.run_step, lambda _: (batch, 0.0), num_steps)
    with real_batches(data, batch_sharding(mesh)) as next_batch:
        return time_loop(programs.run_step, next_batch, num_steps)


def _trace(
    folder: pathlib.Path, loop: Callable[[], object], step: jax.stages.Compiled, say: Callable[..., object]
) -> None:
    with jax.profiler.trace(str(folder), create_perfetto_trace=True):
        loop()
    text = step.as_text() or ""
    with gzip.open(folder / HLO_FILE, "wt") as file:
        file.write(text)
    say(f"trace: tensorboard --logdir {folder} (tab Profile), or its perfetto_trace.json.gz in Perfetto's viewer")
    for line in describe(folder, text, NUM_WARMUP + TRACED_STEPS):
        say(line)


def _effects(
    config: TrainConfig,
    acceleration: Acceleration,
    environment: Environment,
    mesh: Mesh,
    programs: Programs,
    data: Data | Mixture | None,
    host_batch: Any,
    own: argparse.Namespace,
    say: Callable[..., object],
) -> list[Effect]:
    if own.measure_switches:
        effects = list(measure_step_switches(config, acceleration, mesh, programs, host_batch, own.repeats, say))
        if data is not None:
            opened = data.config
            effects += measure_data_switches(
                data, acceleration, lambda other: _open(opened, other, environment), own.steps, say
            )
        return effects
    effects = [
        Effect(switch=entry.switch, what=entry.candidate, part="step")
        for entry in missing_step_switches(config, acceleration)
    ]
    if data is not None:
        effects += [Effect(switch=s, what=what, part="loader") for s, what in missing_data_switches(acceleration)]
    return effects
