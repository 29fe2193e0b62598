"""Searches the fastest setting of the training step on this machine, then how many data workers keep up with it.

From upstream's settings: all that may save time at once, the largest batch that is predicted to fit, then one change
after the other. Each trial is a process of its own, and refused before it runs where the compiled step does not fit.
What you give (options of scripts/train.py, OPENPI_ switches) is kept and not searched. Further: --budget-min 8,
--steps 6 per trial, --out FILE (default tuned/<config>.json, which `run_opt.sh CONFIG --tuned` reads),
--memory-limit-gib N (default: the card's), --memory-fraction 0.95 of it that JAX may use.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from openpi_accel.config.schema import TrainConfig
from openpi_accel.errors import UserError
from openpi_accel.parallel.same_program import code_hash
from openpi_accel.tools.doctor.machine import run_command
from openpi_accel.tools.opt_settings import chosen_settings
from openpi_accel.tools.tune import loader, tuned_file
from openpi_accel.tools.tune.search import Search, fastest
from openpi_accel.tools.tune.space import fixed_fields, start_point
from openpi_accel.tools.tune.trials import Bench, Trial

_GIB = 2**30
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_PROG = "python scripts/tune.py"
# Kept back from the budget for the loader, where there are data.
_LOADER_S = 60.0
# The loader should come with that much more than the step takes, or the step waits now and then.
_SPARE = 1.1


def main(argv: Sequence[str], env: Mapping[str, str], repo: pathlib.Path) -> int:
    """Searches, prints a table of what was tried, and writes the file.

    Args:
        argv: without the program's name.
        env: of the user; the trials get it too.
        repo: the project's folder.

    Raises:
        UserError: no such config, nothing ran, or values that contradict each other.
    """
    started_s = time.monotonic()
    own, rest = _parse(argv)
    # The prompt length is a matter of data, not of speed: as the launcher has it, unless the user says otherwise.
    config, _ = chosen_settings(rest, env, plain=False, prog=_PROG, description=__doc__ or "", keep_auto=True)
    data = None if config.data.path is None else loader.open_data(config, env)
    length = (config if data is None else data.config).model.max_token_len
    plain, acceleration = chosen_settings(
        [*rest[:1], "--model.max-token-len", str(length), *rest[1:]],
        env,
        plain=True,
        prog=_PROG,
        description=__doc__ or "",
    )
    hardware = tuned_file.look(run_command, env)
    out = own.out or repo / "tuned" / f"{plain.name}.json"
    code = code_hash(repo / "openpi_accel")
    limit_gib = own.memory_limit_gib
    if limit_gib is None and hardware.memory_gib is not None:
        limit_gib = hardware.memory_gib * own.memory_fraction
    bench = Bench(
        command=_bench_command(repo, rest, plain, own.steps, own.memory_limit_gib),
        environment=_environment(env, hardware, repo, own.memory_fraction),
        num_devices=hardware.num_devices,
        key={
            "options": [*rest, f"--steps={own.steps}", f"--memory-limit-gib={own.memory_limit_gib}"],
            "switches": {name: value for name, value in env.items() if name.startswith("OPENPI_")},
            "device": hardware.device,
            "num_devices": hardware.num_devices,
            "code": code,
            "jax": jax.__version__,
        },
        file=out.with_suffix(".trials.jsonl"),
    )
    console = Console(stderr=True)
    search = Search(
        config=plain,
        bench=bench,
        fixed=fixed_fields(rest, env),
        limit=None if limit_gib is None else int(limit_gib * _GIB),
        budget_s=own.budget_min * 60 - (0 if data is None else _LOADER_S),
        say=lambda trial: console.print(_line(trial), highlight=False, soft_wrap=True),
    )
    trials = search.run(start_point(plain, acceleration, hardware.num_devices))
    best = fastest(trials)
    if best is None:
        reasons = "; ".join(dict.fromkeys(trial.reason or "" for trial in trials))
        raise UserError(f"no setting ran: {reasons or 'there was no time'}. What fits: python scripts/plan.py.")
    found = _found(best, trials)
    arguments = best.point.arguments(hardware.num_devices)
    if data is None:
        found["loader"] = "not measured: no --data.path"
    else:
        batch_size = best.point.batch_per_device * hardware.num_devices
        words, found["loader"] = _tune_loader(data, batch_size, best, started_s + own.budget_min * 60)
        arguments += words
    tuned_file.write(
        out,
        tuned_file.Tuned(
            config=plain.name,
            device=hardware.device,
            num_devices=hardware.num_devices,
            code=code,
            environment=best.point.environment | {n: v for n, v in bench.environment.items() if n == _FRACTION},
            arguments=tuple(arguments),
            found=found,
        ),
    )
    Console().print(_table(trials))
    print(f"fastest: {best.samples_per_s:.1f} samples/s with {best.point}")
    print(f"loader: {found['loader'] if isinstance(found['loader'], str) else found['loader']['verdict']}")
    print(f"written to {out}; train with it: bash run_opt.sh {plain.name} --tuned" + (f" {own.out}" if own.out else ""))
    return 0


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--budget-min", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--memory-limit-gib", type=float)
    parser.add_argument("--memory-fraction", type=float, default=0.95)
    own, rest = parser.parse_known_args(argv)
    if own.budget_min <= 0 or own.steps < 1 or not 0 < own.memory_fraction <= 1 or (own.memory_limit_gib or 1) <= 0:
        raise UserError(
            "--budget-min and --memory-limit-gib must be above 0, --steps at least 1, --memory-fraction above 0 and at "
            "most 1."
        )
    return own, rest


def _bench_command(
    repo: pathlib.Path, rest: Sequence[str], config: TrainConfig, steps: int, limit_gib: float | None
) -> list[str]:
    command = [sys.executable, str(repo / "scripts" / "bench.py"), *rest, "--steps", str(steps)]
    command += ["--model.max-token-len", str(config.model.max_token_len)]
    return command if limit_gib is None else [*command, "--memory-limit-gib", str(limit_gib)]


def _environment(
    env: Mapping[str, str], hardware: tuned_file.Hardware, repo: pathlib.Path, fraction: float
) -> dict[str, str]:
    """Of the trials: on a GPU with XLA's options as the launcher sets them, which are no part of the search."""
    clean = {name: value for name, value in env.items() if not name.startswith("OPENPI_")}
    clean.setdefault("JAX_COMPILATION_CACHE_DIR", str(repo / ".cache" / "jax"))
    if hardware.device == "cpu":
        return clean
    flags = re.search(r'^XLA_GPU_FLAGS="(.*)"$', (repo / "scripts" / "launch.sh").read_text(), flags=re.MULTILINE)
    assert flags is not None, "scripts/launch.sh sets XLA_GPU_FLAGS"
    clean["XLA_FLAGS"] = f"{flags[1]} {env.get('XLA_FLAGS', '')}".strip()
    clean.setdefault("JAX_OPTIMIZATION_LEVEL", "O1")
    clean.setdefault(_FRACTION, f"{fraction:g}")
    return clean


def _tune_loader(
    data: loader.OpenedData, batch_size: int, best: Trial, ends_s: float
) -> tuple[list[str], dict[str, Any]]:
    """Options of the loader, and what was measured."""
    rates = loader.measure(data, batch_size, len(os.sched_getaffinity(0)), ends_s - time.monotonic())
    needed = best.samples_per_s or 0.0
    chosen = loader.choose(rates, needed * _SPARE)
    verdict = f"{chosen.samples_per_s:.1f} samples/s with {chosen.num_workers} workers, the step takes {needed:.1f}"
    if chosen.samples_per_s < needed:
        verdict += (
            ": the loader is the bound. Pack the dataset once (scripts/pack_dataset.py, docs/data.md), or give this "
            "process more cores"
        )
    words = ["--num-workers", str(chosen.num_workers), "--data.prefetch-batches", str(chosen.prefetch_batches)]
    measured = [dataclasses.asdict(rate) for rate in rates]
    return words, {"verdict": verdict, "bound": chosen.samples_per_s < needed, "measured": measured}


def _found(best: Trial, trials: Sequence[Trial]) -> dict[str, Any]:
    rows = [{"setting": str(trial.point)} | dataclasses.asdict(trial) for trial in trials]
    return {"samples_per_s": best.samples_per_s, "step_s": best.step_s, "trials": rows}


def _line(trial: Trial) -> str:
    if trial.samples_per_s is None:
        return f"{'-':>8}            {trial.point}: {trial.reason}"
    return f"{trial.samples_per_s:8.2f} samples/s  {trial.point}"


def _table(trials: Sequence[Trial]) -> Table:
    table = Table("setting", "samples/s", "ms/step", "predicted GiB", "peak GiB", "trial s")
    for trial in trials:
        speed = "-" if trial.samples_per_s is None else f"{trial.samples_per_s:.2f}"
        step = trial.reason or "" if trial.step_s is None else f"{trial.step_s * 1e3:.1f}"
        shown = ["-" if gib is None else f"{gib:.1f}" for gib in (trial.predicted_gib, trial.peak_gib)]
        table.add_row(str(trial.point), speed, step, *shown, f"{trial.wall_s:.0f}")
    return table


def settings(argv: Sequence[str], env: Mapping[str, str], repo: pathlib.Path) -> int:
    """Prints a tuned file for the launcher: a line `NAME=VALUE` per variable, then a line per word of the options.

    Raises:
        UserError: the file is missing or made for others.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python scripts/tuned_settings.py CONFIG [FILE]\n\nPrints what scripts/tune.py found.")
        return 0 if argv else 2
    config, *named = argv
    path = pathlib.Path(named[0]) if named and named[0] else repo / "tuned" / f"{config}.json"
    tuned = tuned_file.read(path, config, tuned_file.look(run_command, env), code_hash(repo / "openpi_accel"))
    print(*(f"{name}={value}" for name, value in tuned.environment.items()), *tuned.arguments, sep="\n")
    return 0
