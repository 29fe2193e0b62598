"""Times the training step on device-resident random data of the config's shapes; prints one JSON line.

    python scripts/bench.py <config> [--steps N] [--trace DIR] [--log FILE] [train options]
    python scripts/bench.py <config> --ablate [--cases A,B] [--results FILE] [train options]

The first runs what the OPENPI_ switches say, as training does; --trace writes a profile and prints where the time goes;
--memory-limit-gib refuses a step that needs more, before it runs. --log writes loss and norms of every step, as
training does to its metrics.jsonl: two of them are compared by scripts/compare_runs.py.
The second runs every acceleration alone and all without it, a process each, and appends a JSON line per case to FILE;
called again with the same options it goes on with what is missing. --xla-flags is one more item to leave out or in.
"""

import argparse
import dataclasses
import gzip
import json
import os
import pathlib
import sys

import _entry
import jax

from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.flags import Acceleration
from openpi_accel.tools import ablate
from openpi_accel.tools.trace_table import describe


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trace")
    parser.add_argument("--log", type=pathlib.Path)
    parser.add_argument("--memory-limit-gib", type=float)
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--cases")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("ablation.jsonl"))
    parser.add_argument("--case-timeout-s", type=float, default=600)
    parser.add_argument("--xla-flags", default="")
    own, rest = parser.parse_known_args()
    if own.ablate:
        run_ablation(own, rest)
        return
    config = parse_train_config(rest, prog="python scripts/bench.py", description=__doc__ or "")
    jax.config.update("jax_threefry_partitionable", True)
    from openpi_accel.tools.bench import HLO_FILE, TRACED_STEPS, measure

    limit = None if own.memory_limit_gib is None else int(own.memory_limit_gib * 2**30)
    result = measure(
        config,
        Acceleration.from_env(os.environ),
        num_steps=max(1, own.steps),
        trace_dir=own.trace,
        memory_limit=limit,
    )
    if own.trace is not None:
        folder = pathlib.Path(own.trace)
        hlo = gzip.decompress((folder / HLO_FILE).read_bytes()).decode()
        print("\n".join(describe(folder, hlo, TRACED_STEPS)), file=sys.stderr)
    if own.log is not None:
        own.log.parent.mkdir(parents=True, exist_ok=True)
        own.log.write_text("".join(f"{json.dumps(row)}\n" for row in result.log))
    line = {name: value for name, value in dataclasses.asdict(result).items() if name != "log"}
    print(json.dumps(line))
    sys.stdout.flush()


def run_ablation(own: argparse.Namespace, rest: list[str]) -> None:
    """Runs the cases and prints one table of everything that the file holds for this command."""
    parse_train_config(
        rest, prog="python scripts/bench.py", description=__doc__ or ""
    )  # a mistake shows before the first case
    xla = {"XLA_FLAGS": own.xla_flags, "JAX_OPTIMIZATION_LEVEL": "O1"} if own.xla_flags else {}
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), *rest, "--steps", str(own.steps)]
    cases = ablate.choose_cases(own.cases, ablate.all_cases(xla))
    rows = ablate.ablate(cases, command, os.environ, own.results, own.case_timeout_s)
    print("\n".join(ablate.format_row(row) for row in rows))
    if any("error" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    _entry.run(main)
