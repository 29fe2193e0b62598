"""Shows what a LeRobot dataset holds, how pi0.5 would read it, and which frames are bad."""

import argparse
import dataclasses
import json
import math
import pathlib
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from openpi_accel.config.environment import Environment
from openpi_accel.config.schema import AUTO, DataConfig
from openpi_accel.data.lerobot.check import Problem, check_columns, check_frames
from openpi_accel.data.lerobot.dataset import LeRobotDataset, open_dataset
from openpi_accel.data.lerobot.locate import find_dataset
from openpi_accel.data.mapping import propose_mapping, resolve_columns
from openpi_accel.data.packed import PackedFrames, read_manifest
from openpi_accel.data.tokenizer import PromptTokenizer, find_tokenizer, scan_prompt_lengths
from openpi_accel.errors import UserError
from openpi_accel.sizes import format_bytes

_PALIGEMMA_PIECES = 257152
_MAX_SHOWN = 50


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """The script. 1 where --check finds something wrong, the pack of --packed cannot be used, or a camera's first
    frame cannot be read.

    Raises:
        UserError: no dataset there, or an option that does not fit it.
    """
    args = _parser().parse_args(argv)
    rows = parse_rows(args.rows) if args.rows is not None else []
    if args.horizon < 1 or args.num_workers < 1:
        raise UserError("--horizon and --num-workers must be at least 1.")
    dataset = open_dataset(_root(args.path, Environment.from_env(env)))
    tokenizer = None
    if args.tokenizer:
        path = find_tokenizer(args.tokenizer, Environment.from_env(env), option="--tokenizer")
        tokenizer = PromptTokenizer(path, max_token_len=None, vocab_size=_PALIGEMMA_PIECES)
    report = describe(dataset, tokenizer)
    if rows:
        columns = DataConfig(repo_id=str(dataset.root), state_key=args.state_key, action_key=args.action_key)
        report["rows"] = describe_rows(dataset, np.array(rows), args.horizon, columns)
    problems: list[Problem] | None = None
    if args.check:
        problems = check(dataset, args.num_workers, Console(stderr=True))
        report["problems"] = [{"dataset": str(dataset.root)} | dataclasses.asdict(problem) for problem in problems]
    if args.packed:
        report["packed"] = describe_pack(dataset, pathlib.Path(args.packed).expanduser())
    if args.json:
        print(json.dumps(_plain(report), ensure_ascii=False))
    else:
        _print(Console(), report)
    unusable_pack = "problem" in report.get("packed", {})
    return 1 if problems or unusable_pack or any("problem" in camera for camera in report["cameras"].values()) else 0


def describe(dataset: LeRobotDataset, tokenizer: PromptTokenizer | None = None) -> dict[str, Any]:
    """Version, sizes, cameras, columns, tasks with prompt lengths, and the proposed mapping.

    Reads the task_index column and the first frame's header of every camera, nothing else.
    """
    lengths = np.diff(dataset.episode_starts)
    report: dict[str, Any] = {
        "path": str(dataset.root),
        "version": dataset.version,
        "fps": dataset.fps,
        "episodes": dataset.num_episodes,
        "frames": dataset.num_frames,
        "shortest_episode": int(lengths.min()),
        "longest_episode": int(lengths.max()),
        "fingerprint": dataset.fingerprint(),
        "cameras": {key: _camera(dataset, key) for key in dataset.cameras},
        "columns": {
            key: {"dtype": feature.dtype, "shape": list(feature.shape)}
            for key, feature in dataset.features.items()
            if key not in dataset.cameras
        },
    }
    try:
        mapping = propose_mapping(dataset)
        report["mapping"] = {
            "cameras": mapping.cameras.as_dict(),
            "state_key": mapping.state_key,
            "state_dim": mapping.state_dim,
            "action_key": mapping.action_key,
            "action_dim": mapping.action_dim,
            "notes": list(mapping.notes),
        }
        state_dim = mapping.state_dim
    except UserError as error:
        report["mapping"], report["mapping_problem"], state_dim = None, str(error), None
    report["tasks"] = _tasks(dataset, tokenizer, state_dim)
    return report


def describe_rows(dataset: LeRobotDataset, rows: np.ndarray, horizon: int, columns: DataConfig) -> list[dict[str, Any]]:
    """State, action chunk, padding, task and the crc32 of each camera's uint8 H W 3 frame, for each row.

    Raises:
        UserError: a row that is not there, no column for state or actions, or a bad frame.
    """
    try:
        keys = resolve_columns(columns, dataset)
    except UserError as error:
        raise UserError(str(error).replace("--data.", "--")) from error
    episodes = dataset.episode_of(rows)
    chunks, is_pad = dataset.chunk(keys.action_key, rows, horizon)
    tasks = dataset.task_of(rows)
    state = dataset.column(keys.state_key)
    checksums = {
        camera: [zlib.crc32(np.ascontiguousarray(frame)) for frame in dataset.frames(camera, rows)]
        for camera in dataset.cameras
    }
    return [
        {
            "row": row,
            "episode": int(dataset.episode_ids[episode]),
            "frame": row - int(dataset.episode_starts[episode]),
            "task": tasks[i],
            "state": state[row].tolist(),
            "action": chunks[i].tolist(),
            "action_is_pad": is_pad[i].tolist(),
            "crc32": {camera: values[i] for camera, values in checksums.items()},
        }
        for i, (row, episode) in enumerate(zip(rows.tolist(), episodes.tolist(), strict=True))
    ]


def describe_pack(dataset: LeRobotDataset, folder: pathlib.Path) -> dict[str, Any]:
    """What is packed there, and whether training would take it.

    Raises:
        UserError: nothing is packed there, or its manifest is damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"Nothing is packed in {folder}. scripts/pack_dataset.py packs a dataset.")
    entry: dict[str, Any] = {
        "folder": str(folder),
        "cameras": list(manifest.cameras),
        "rows": manifest.num_rows,
        "shards": len(manifest.shards),
        "shards_there": sum(shard is not None for shard in manifest.shards),
        "gb": manifest.num_rows * manifest.record_bytes / 1e9,
        "bad_frames": len(manifest.bad),
    }
    try:
        PackedFrames(folder, dataset, manifest.cameras, "python scripts/pack_dataset.py CONFIG --data.packed=…").close()
    except UserError as error:
        entry["problem"] = str(error)
    return entry


def check(dataset: LeRobotDataset, num_workers: int, console: Console) -> list[Problem]:
    """Reads everything; a progress bar on a terminal."""
    problems = check_columns(dataset)
    total = dataset.num_frames * len(dataset.cameras)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("frames", total=total)
        return problems + check_frames(dataset, num_workers, lambda count: progress.advance(task, count))


def parse_rows(text: str) -> list[int]:
    """0,5,77 and ranges like 10-19.

    Raises:
        UserError: anything else.
    """
    rows: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise UserError(
                f"--rows {text!r} is not understood at {part!r}. Write row numbers, for example --rows 0,5,77."
            )
        rows += range(int(match[1]), int(match[2] or match[1]) + 1)
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="inspect_dataset.py", description=__doc__)
    parser.add_argument("path", help="dataset folder, or the name of a dataset that is on this machine (org/name)")
    parser.add_argument("--check", action="store_true", help="read every value and frame, name bad ones; exit code 1")
    parser.add_argument("--rows", help="show these rows in full, for example 0,5,77 or 10-19")
    parser.add_argument("--horizon", type=int, default=10, help="steps of the action chunks of --rows (default 10)")
    parser.add_argument("--state-key", default=AUTO, help="state column of --rows (default: by its usual name)")
    parser.add_argument("--action-key", default=AUTO, help="action column of --rows (default: by its usual name)")
    parser.add_argument("--tokenizer", help="SentencePiece model file: show prompt lengths in tokens too")
    parser.add_argument("--packed", help="folder of a packed cache: say whether it is complete and this dataset's")
    parser.add_argument("--num-workers", type=int, default=2, help="threads of --check (default 2)")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    return parser


def _root(path: str, environment: Environment) -> pathlib.Path:
    if not pathlib.Path(path).expanduser().exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", path) and path[0] != ".":
        return find_dataset(path, None, environment, option="PATH, in place of its name")
    return pathlib.Path(path).expanduser()


def _camera(dataset: LeRobotDataset, key: str) -> dict[str, Any]:
    camera = dataset.cameras[key]
    entry = {"kind": camera.kind, "height": camera.height, "width": camera.width, "codec": camera.codec}
    entry["depth"] = camera.depth
    try:
        entry["codec"] = dataset.codec_of(key)
    except UserError as error:
        entry["problem"] = str(error)
    return entry


def _tasks(dataset: LeRobotDataset, tokenizer: PromptTokenizer | None, state_dim: int | None) -> list[dict[str, Any]]:
    numbers, frames = np.unique(dataset.column("task_index"), return_counts=True)
    first_rows = dataset.column("task_index")[dataset.episode_starts[:-1]]
    tasks = []
    for number in sorted({*numbers.tolist(), *dataset.tasks}):
        text = dataset.tasks.get(number)
        entry: dict[str, Any] = {
            "task_index": number,
            "task": text,
            "episodes": int((first_rows == number).sum()),
            "frames": int(frames[numbers == number].sum()),
            "characters": len(text or ""),
            "words": len((text or "").split()),
        }
        if tokenizer is not None and text is not None:
            entry["tokens"] = len(tokenizer.ids(text))
            if state_dim is not None:
                entry["tokens_with_state"] = scan_prompt_lengths(tokenizer, [text], state_dim).longest
        tasks.append(entry)
    return tasks


def _plain(value: Any) -> Any:
    """NaN and infinity as text, because JSON has no numbers for them."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print(console: Console, report: dict[str, Any]) -> None:
    def line(text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    line(
        f"{report['path']}: LeRobot {report['version']}, {report['episodes']} episodes of {report['shortest_episode']} "
        f"to {report['longest_episode']} frames, {report['frames']} frames at {report['fps']:g} per second"
    )
    cameras = Table("camera", "kind", "height x width", "codec")
    for key, entry in report["cameras"].items():
        kind = "depth " + entry["kind"] if entry["depth"] else entry["kind"]
        codec = entry["codec"] + (" (unreadable)" if "problem" in entry else "")
        cameras.add_row(escape(key), kind, f"{entry['height']} x {entry['width']}", codec)
    columns = Table("column", "dtype", "shape")
    for key, entry in report["columns"].items():
        columns.add_row(escape(key), entry["dtype"], "x".join(map(str, entry["shape"])))
    has_tokens = any("tokens" in entry for entry in report["tasks"])
    lengths = ["characters", "words", *(["tokens", "tokens_with_state"] if has_tokens else [])]
    tasks = Table("task", *(name.replace("_", " ") for name in ("episodes", "frames", *lengths)))
    for entry in report["tasks"][:_MAX_SHOWN]:
        numbers = [str(entry.get(name, "")) for name in ("episodes", "frames", *lengths)]
        tasks.add_row(
            escape(f"{entry['task_index']}: {entry['task'] if entry['task'] is not None else '(no text)'}"), *numbers
        )
    for table in (cameras, columns, tasks):
        console.print(table)
    if len(report["tasks"]) > _MAX_SHOWN:
        line(f"and {len(report['tasks']) - _MAX_SHOWN} more tasks")
    for key, entry in report["cameras"].items():
        if "problem" in entry:
            line(f"camera {key}: {entry['problem']}")
    line("Proposed mapping to pi0.5's inputs:")
    for note in report["mapping"]["notes"] if report["mapping"] else [report["mapping_problem"]]:
        line(f"  {note}")
    if packed := report.get("packed"):
        line(
            f"packed in {packed['folder']}: {', '.join(packed['cameras'])}, {format_bytes(packed['gb'] * 1e9)}, "
            f"{packed['shards_there']} of {packed['shards']} shards, {packed['bad_frames']} bad frames; "
            f"{packed.get('problem', 'complete and of this dataset')}"
        )
    for row in report.get("rows", []):
        line(f"row {row['row']}: episode {row['episode']}, frame {row['frame']}, task: {row['task']}")
        line(f"  state {_numbers(row['state'])}")
        for step, (values, pad) in enumerate(zip(row["action"], row["action_is_pad"], strict=True)):
            line(f"  action {step} {_numbers(values)}{'  past the end' if pad else ''}")
        for camera, value in row["crc32"].items():
            line(f"  crc32 {camera} {value}")
    if "problems" in report:
        runs = _runs(report["problems"])
        for first, last in runs[:_MAX_SHOWN]:
            frames = f"frame {first['frame']}" if first is last else f"frames {first['frame']} to {last['frame']}"
            where = f"episode {first['episode']}, {frames}, " if first["row"] is not None else ""
            line(f"bad: {where}{first['source']}: {first['problem']}")
        if len(runs) > _MAX_SHOWN:
            line(f"and {len(runs) - _MAX_SHOWN} more; --json lists all")
        line(
            f"checked {report['frames']} frames of {len(report['cameras'])} cameras: {len(report['problems'])} problems"
        )


def _runs(problems: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(first, last) of frames in a row with the same fault."""
    runs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for problem in problems:
        if runs and problem["row"] is not None:
            last = runs[-1][1]
            same = all(problem[name] == last[name] for name in ("episode", "source", "problem"))
            if same and problem["row"] == last["row"] + 1:
                runs[-1] = runs[-1][0], problem
                continue
        runs.append((problem, problem))
    return runs


def _numbers(values: Any) -> str:
    return " ".join(f"{value:.9g}" for value in np.asarray(values).reshape(-1).tolist())
