"""The accelerations one by one: each alone against all off, and each taken from all on, a process per case."""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from openpi_accel.accel.catalog import CATALOG
from openpi_accel.errors import UserError
from openpi_accel.sizes import format_bytes

OFF, ON, WITHOUT = "off", "on", "without_"
XLA = "xla_options"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One run of scripts/bench.py: variables and options beside the common ones."""

    name: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...]


def all_cases(xla_environment: Mapping[str, str]) -> dict[str, Case]:
    """Name -> case: off, on, every acceleration alone, and without_<name>: all on but that one.

    Args:
        xla_environment: XLA's variables, as one more item; empty leaves them out.
    """
    alone = {
        entry.name: Case(name=entry.name, environment=entry.environment, arguments=entry.arguments) for entry in CATALOG
    }
    in_opt = [entry.name for entry in CATALOG if entry.in_opt]
    if xla_environment:
        alone[XLA] = Case(name=XLA, environment=xla_environment, arguments=())
        in_opt.append(XLA)

    def joined(name: str, parts: Sequence[str]) -> Case:
        environment = {key: value for part in parts for key, value in alone[part].environment.items()}
        return Case(name=name, environment=environment, arguments=tuple(a for p in parts for a in alone[p].arguments))

    cases = [joined(OFF, []), joined(ON, in_opt), *alone.values()]
    cases += [joined(WITHOUT + name, [n for n in in_opt if n != name]) for name in in_opt]
    return {case.name: case for case in cases}


def choose_cases(names: str | None, cases: Mapping[str, Case]) -> list[Case]:
    """The cases of a comma-separated list, all where it is None; `off` always comes first, as the call's baseline.

    Raises:
        UserError: a name that does not exist.
    """
    wanted = list(cases) if names is None else [name for name in names.split(",") if name]
    for name in wanted:
        if name not in cases:
            raise UserError(f"--cases names {name!r}, which is none of {', '.join(cases)}.")
    return [cases[OFF], *(cases[name] for name in wanted if name != OFF)]


def ablate(
    cases: Sequence[Case],
    command: Sequence[str],
    environment: Mapping[str, str],
    results: pathlib.Path,
    timeout_s: float,
) -> list[dict[str, Any]]:
    """Runs the cases that `results` does not hold yet and appends a JSON line for each as soon as it is done.

    Args:
        cases: the first is the baseline and runs in every call.
        command: of the benchmark, with its common options.
        environment: for the children; a case's own variables come on top, all other accelerations are left out.
        results: JSON lines: case, command, and result or error.
        timeout_s: for one case.

    Returns:
        The rows of this call and of earlier ones with the same command.
    """
    rows = [row for row in _read(results) if row["command"] == list(command)]
    done = {row["case"] for row in rows if "result" in row}
    clean = {name: value for name, value in environment.items() if not name.startswith("OPENPI_")}
    baseline: float | None = None
    for index, case in enumerate(cases):
        if index > 0 and case.name in done:
            continue
        row: dict[str, Any] = {"case": case.name, "command": list(command)}
        row |= _run([*command, *case.arguments], clean | dict(case.environment), timeout_s)
        if "result" in row:
            baseline = row["result"]["samples_per_s"] if index == 0 else baseline
            row["times_baseline"] = row["result"]["samples_per_s"] / baseline if baseline else None
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(format_row(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {timeout_s:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return {"error": f"exit code {done.returncode}: {done.stderr[-600:].strip()}"}
    return {"result": json.loads(lines[-1])}


def _read(results: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def format_row(row: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    if "error" in row:
        return f"{row['case']:<26} {row['error']}"
    result = row["result"]
    peak = result["peak_memory_gib"]
    temporaries = f"{format_bytes(result['temporaries_gib'] * 2**30):>11} temporaries"
    memory = f"{format_bytes(peak * 2**30):>11}" if peak is not None else temporaries
    times = row["times_baseline"]
    return (
        f"{row['case']:<26} {result['samples_per_s']:8.2f} samples/s  {result['step_s'] * 1e3:8.1f} ms  "
        f"{f'{times:5.2f} x' if times else '    - x'}  {memory}"
    )
