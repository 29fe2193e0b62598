"""Packs the cameras that a run consumes: decoded and resized once, so that training only reads pixels."""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.environment import Environment
from openpi_accel.config.schema import TrainConfig
from openpi_accel.data.lerobot.dataset import open_dataset
from openpi_accel.data.lerobot.locate import find_dataset
from openpi_accel.data.mapping import resolve_mapping
from openpi_accel.data.packing import Plan, pack, plan, verify
from openpi_accel.errors import UserError
from openpi_accel.sizes import format_bytes

_PROG = "python scripts/pack_dataset.py"


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """The script: `pack_dataset.py CONFIG --data.packed FOLDER [train options] [--dry-run] [--check] [--json]`.

    1 where --check finds something wrong.

    Raises:
        UserError: no dataset, no folder, no room, or a pack of something else is there.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(argv)
    description = (
        f"{__doc__} Takes the options of scripts/train.py; --data.packed says where to. Further: --dry-run tells the "
        "size and writes nothing, --check reads a pack and compares checksums, --json prints one line."
    )
    config = parse_train_config(rest, prog=_PROG, description=description)
    if config.data.packed is None and not own.dry_run:
        raise UserError("--data.packed is missing: the folder to pack into, for example --data.packed=packed/libero.")
    folder = pathlib.Path(config.data.packed or ".no-folder").expanduser().absolute()
    path = config.data.path or env.get("DATA_PATH")
    dataset = open_dataset(
        find_dataset(config.data.repo_id, path, Environment.from_env(env), option="--data.path (or DATA_PATH)")
    )
    cameras = list(dict.fromkeys(resolve_mapping(config.data, dataset).cameras.as_dict().values()))
    planned = plan(folder, dataset, cameras, overwrite=config.overwrite)
    console = Console(stderr=True)
    report: dict[str, Any] = {
        "dataset": str(dataset.root),
        "packed": str(folder),
        "cameras": cameras,
        "rows": planned.manifest.num_rows,
        "shards": len(planned.manifest.shards),
        "total_gb": planned.total_bytes / 1e9,
        "left_gb": planned.left_bytes / 1e9,
        "free_gb": planned.free_bytes / 1e9,
    }
    console.print(_describe(report), highlight=False, soft_wrap=True)
    problems: list[str] = []
    if own.check:
        problems = _check(folder, planned, console)
        report["problems"] = problems
    elif not own.dry_run:
        report["bad"] = _pack(folder, config, dataset, planned, console)
    if own.json:
        print(json.dumps(report))
    else:
        for line in problems:
            print(f"bad: {line}")
        if "bad" in report:
            for row, camera, why in report["bad"]:
                print(f"left out: row {row}, camera {camera}: {why}")
            print(f"packed: train with --data.packed={folder}")
        elif own.check:
            print(f"checked {len(planned.manifest.shards)} shards: {len(problems)} problems")
    return 1 if problems else 0


def _describe(report: Mapping[str, Any]) -> str:
    cameras = report["cameras"]
    total, left, free = (format_bytes(report[f"{name}_gb"] * 1e9) for name in ("total", "left", "free"))
    return (
        f"{report['dataset']}: {report['rows']} rows x {len(cameras)} cameras ({', '.join(cameras)}) make "
        f"{total} in {report['shards']} shards; {left} are still to be "
        f"written, {free} are free"
    )


def _pack(folder: pathlib.Path, config: TrainConfig, dataset: Any, planned: Plan, console: Console) -> list[list[Any]]:
    with _bar(console) as progress:
        task = progress.add_task("packing", total=planned.left_bytes // planned.manifest.record_bytes)
        manifest = pack(
            folder,
            dataset,
            planned,
            num_workers=config.num_workers,
            skip_bad=config.data.on_corrupt == "skip",
            on_rows=lambda count: progress.advance(task, count),
        )
    return [list(entry) for entry in manifest.bad]


def _check(folder: pathlib.Path, planned: Plan, console: Console) -> list[str]:
    missing = sum(shard is None for shard in planned.manifest.shards)
    problems = [f"{missing} of {len(planned.manifest.shards)} shards are missing"] if missing else []
    there = dataclasses.replace(planned.manifest, shards=tuple(s for s in planned.manifest.shards if s is not None))
    if missing:
        return problems
    with _bar(console) as progress:
        task = progress.add_task("checking", total=there.num_rows)
        return verify(folder, there, lambda count: progress.advance(task, count))


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
