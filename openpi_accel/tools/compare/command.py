"""Compares two runs step by step: losses, learning rate, norms, throughput, memory, settings.

The verdict: learning rates equal to the bit, the same samples, everything finite, and the losses within the bounds; or,
instead of the bounds, every logged loss and norm equal to the bit (--assert-equal), or within a relative difference
(--rtol). Exit code 1 where a line of the verdict fails.
"""

import argparse
import json
import os
import pathlib
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from openpi_accel.tools.compare.plots import draw_plots
from openpi_accel.tools.compare.report import as_json, figures, html_report
from openpi_accel.tools.compare.runs import read_run
from openpi_accel.tools.compare.verdict import Bounds, Comparison, compare


def main(argv: Sequence[str]) -> int:
    """`compare_runs.py A B [--options]`.

    Returns:
        0; 1 where a line of the verdict fails.

    Raises:
        UserError: a run without a log, or two that have nothing in common.
    """
    arguments = _parser().parse_args(argv)
    bounds = Bounds(
        mean_difference=arguments.max_mean_difference,
        late_difference=arguments.max_late_difference,
        equal=arguments.assert_equal,
        relative=arguments.rtol,
    )
    control = None if arguments.control is None else read_run(arguments.control)
    comparison = compare(read_run(arguments.a), read_run(arguments.b), bounds, control)
    if arguments.html is not None or arguments.plots is not None:
        plots = list(draw_plots(comparison, bounds))
        if arguments.plots is not None:
            for plot in plots:
                _write(arguments.plots / f"{plot.name}.png", plot.png)
        if arguments.html is not None:
            _write(arguments.html, html_report(comparison, plots).encode())
    if arguments.json:
        print(json.dumps(as_json(comparison)))
    else:
        _print(comparison, Console(highlight=False, soft_wrap=True), arguments)
    return 0 if comparison.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python scripts/compare_runs.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=pathlib.Path, metavar="A", help="folder of a run, or its metrics.jsonl: the baseline")
    parser.add_argument("b", type=pathlib.Path, metavar="B", help="the run to compare with it")
    parser.add_argument(
        "--control", type=pathlib.Path, help="a run that differs from A by rounding alone: how far does that go?"
    )
    parser.add_argument("--max-mean-difference", type=float, default=1e-4, help="of the losses (default %(default)s)")
    parser.add_argument(
        "--max-late-difference", type=float, default=1e-3, help="of the last tenth's mean losses (default %(default)s)"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--assert-equal", action="store_true", help="every logged loss and norm equal to the bit")
    instead.add_argument("--rtol", type=float, metavar="R", help="every logged loss and norm within R, relative")
    parser.add_argument("--html", type=pathlib.Path, metavar="FILE", help="write a report that needs no other file")
    parser.add_argument("--plots", type=pathlib.Path, metavar="DIR", help="write the pictures as PNG")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    return parser


def _print(comparison: Comparison, console: Console, arguments: argparse.Namespace) -> None:
    table = Table("", "A", "B", "unit")
    for row in figures(comparison):
        table.add_row(*row)
    console.print(table)
    table = Table("difference", "mean", "largest", "at step", "largest relative")
    for name, d in comparison.distance.differences.items():
        numbers = ["-" if value is None else f"{value:.2e}" for value in (d.mean, d.largest, d.largest_relative)]
        table.add_row(name, *numbers[:2], "-" if d.largest_at is None else str(d.largest_at), numbers[2])
    console.print(table)
    if comparison.settings:
        console.print("settings that differ:")
        for name, (a, b) in comparison.settings.items():
            console.print(f"  {name}: {json.dumps(a)} | {json.dumps(b)}", markup=False)
    for note in comparison.notes:
        console.print(f"note: {note}", markup=False)
    for check in comparison.checks:
        console.print(f"{'holds ' if check.passed else 'FAILED'}  {check.name}: {check.text}", markup=False)
    if arguments.html is not None:
        console.print(f"report: {arguments.html}", markup=False)
    if arguments.plots is not None:
        console.print(f"pictures: {arguments.plots}", markup=False)


def _write(path: pathlib.Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_bytes(content)
    os.replace(aside, path)
