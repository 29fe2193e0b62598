"""Shows what a checkpoint holds, and how two differ."""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from openpi_accel.errors import UserError
from openpi_accel.orbax_tree import is_tree_folder, plain_paths, read_leaves, stored_leaves
from openpi_accel.sizes import format_bytes
from openpi_accel.train.run_folder import committed_steps

_MAX_READ_BYTES = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One stored array."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Of one leaf in two checkpoints: the largest |a - b|, the leaf's largest entry in either, and the ratio of both.

    A leaf that is all but zero in one of them, as biases and moments begin, so differs by 1, and not by millions.
    """

    absolute: float
    largest: float
    relative: float


@dataclasses.dataclass(frozen=True)
class StoredTree:
    """The parameters of one checkpoint: where, which step, and path -> metadata or stored path."""

    folder: pathlib.Path
    step: int | None
    leaves: dict[str, Leaf]
    stored_paths: dict[str, str]


def open_tree(path: str | pathlib.Path) -> StoredTree:
    """Finds the parameters in a run folder (its newest checkpoint), a step folder, or a params folder.

    Raises:
        UserError: there are none.
    """
    given = pathlib.Path(path).expanduser()
    if not given.is_dir():
        what = "is a file" if pathlib.Path(given).is_file() else "does not exist"
        raise UserError(f"{given} {what}. Give a run folder, a checkpoint folder in it, or a params folder.")
    steps = committed_steps(given)
    folder = given / str(steps[-1]) if steps else given
    if not is_tree_folder(folder):
        folder = folder / "params"
    if not is_tree_folder(folder):
        raise UserError(
            f"{given} holds no complete checkpoint. Give a run folder (…/<config>/<exp-name>), a checkpoint folder "
            "in it (…/<number>), or a params folder."
        )
    stored = stored_leaves(folder)
    paths = {plain.removeprefix("params/"): raw for plain, raw in plain_paths(stored).items()}
    leaves = {}
    for plain, raw in sorted(paths.items()):
        shape, dtype = tuple(stored[raw].shape), jax.numpy.dtype(stored[raw].dtype)
        leaves[plain] = Leaf(
            shape=shape, dtype=dtype.name, num_bytes=int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        )
    name = folder.parent.name
    return StoredTree(folder, int(name) if name.isdigit() else None, leaves, paths)


def compare(first: StoredTree, second: StoredTree) -> tuple[dict[str, Difference], list[str]]:
    """(differences of the leaves that both have in one shape, faults: names or shapes that differ)."""
    faults = [f"only in {first.folder}: {name}" for name in first.leaves if name not in second.leaves]
    faults += [f"only in {second.folder}: {name}" for name in second.leaves if name not in first.leaves]
    common = [name for name in first.leaves if name in second.leaves]
    for name in common:
        shapes = first.leaves[name].shape, second.leaves[name].shape
        if shapes[0] != shapes[1]:
            faults.append(f"{name}: {shapes[0]} in the first, {shapes[1]} in the second")
    same = [name for name in common if first.leaves[name].shape == second.leaves[name].shape]
    differences: dict[str, Difference] = {}
    for group in _groups(first, same):
        a, b = _read(first, group), _read(second, group)
        differences |= {name: _difference(a[name], b[name]) for name in group}
    return differences, faults


def main(argv: Sequence[str]) -> int:
    """Entry point; 1 where --compare finds other names or shapes."""
    parser = argparse.ArgumentParser(prog="inspect_checkpoint.py", description=__doc__)
    parser.add_argument("path", help="run folder (newest checkpoint), checkpoint folder, or params folder")
    parser.add_argument("--compare", metavar="OTHER", help="a second one; shows the largest difference per leaf")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    args = parser.parse_args(argv)
    first = open_tree(args.path)
    second = open_tree(args.compare) if args.compare else None
    differences, faults = compare(first, second) if second else ({}, [])
    if args.json:
        print(json.dumps(_as_json(first, second, differences, faults)))
    else:
        _print_tables(first, second, differences, faults)
    return 1 if faults else 0


def _difference(a: np.ndarray, b: np.ndarray) -> Difference:
    a, b = a.astype(np.float64), b.astype(np.float64)
    # NaN on both sides is no difference; NaN on one side alone is an infinite one.
    gap = np.where(np.isnan(a) & np.isnan(b), 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf))
    absolute = float(gap.max(initial=0.0))
    largest = max(float(np.nan_to_num(np.abs(x), nan=0.0).max(initial=0.0)) for x in (a, b))
    return Difference(absolute=absolute, largest=largest, relative=absolute / largest if largest else absolute)


def _groups(stored: StoredTree, names: Sequence[str]) -> list[list[str]]:
    """Names in order, in groups of at most _MAX_READ_BYTES, so that two full models need not fit in memory."""
    groups: list[list[str]] = []
    size = 0
    for name in names:
        num_bytes = stored.leaves[name].num_bytes
        if not groups or size + num_bytes > _MAX_READ_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    return groups


def _read(stored: StoredTree, names: Sequence[str]) -> dict[str, np.ndarray]:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    targets = {
        stored.stored_paths[name]: jax.ShapeDtypeStruct(
            stored.leaves[name].shape, jax.numpy.dtype(stored.leaves[name].dtype), sharding=sharding
        )
        for name in names
    }
    arrays = read_leaves(stored.folder, targets)
    return {name: np.asarray(arrays[stored.stored_paths[name]]) for name in names}


def _as_json(
    first: StoredTree, second: StoredTree | None, differences: dict[str, Difference], faults: list[str]
) -> dict[str, Any]:
    content: dict[str, Any] = {
        "path": str(first.folder),
        "step": first.step,
        "num_leaves": len(first.leaves),
        "num_parameters": _num_parameters(first),
        "num_bytes": sum(leaf.num_bytes for leaf in first.leaves.values()),
        "leaves": {name: dataclasses.asdict(leaf) for name, leaf in first.leaves.items()},
    }
    if second is not None:
        content["compare"] = {
            "path": str(second.folder),
            "step": second.step,
            "differences": {name: dataclasses.asdict(gap) for name, gap in differences.items()},
            "faults": faults,
        }
    return content


def _print_tables(
    first: StoredTree, second: StoredTree | None, differences: dict[str, Difference], faults: list[str]
) -> None:
    table = Table(title=f"{first.folder}" + ("" if first.step is None else f", step {first.step}"))
    for column in ("leaf", "shape", "dtype", "size"):
        table.add_column(column, justify="left" if column in ("leaf", "dtype") else "right", overflow="fold")
    if second is not None:
        table.add_column("max |a - b|", justify="right")
        table.add_column("largest entry", justify="right")
        table.add_column("ratio", justify="right")
    for name, leaf in first.leaves.items():
        row = [name, "x".join(map(str, leaf.shape)) or "scalar", leaf.dtype, format_bytes(leaf.num_bytes)]
        if second is not None:
            gap = differences.get(name)
            row += [f"{x:.3g}" for x in (gap.absolute, gap.largest, gap.relative)] if gap else ["-"] * 3
        table.add_row(*row)
    console = Console(width=None if Console().is_terminal else 160, soft_wrap=False)
    console.print(table)
    total = format_bytes(sum(leaf.num_bytes for leaf in first.leaves.values()))
    print(f"{len(first.leaves)} leaves, {_num_parameters(first):,} parameters, {total}")
    if second is not None:
        worst = max(differences, key=lambda name: differences[name].relative, default=None)
        if worst is not None:
            gap = differences[worst]
            print(
                f"compared with {second.folder}: the largest difference, measured by its leaf's largest entry, is "
                f"{gap.relative:.3g} in {worst} ({gap.absolute:.3g} where the largest entry is {gap.largest:.3g})"
            )
        for fault in faults:
            print(f"differs: {fault}")


def _num_parameters(stored: StoredTree) -> int:
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in stored.leaves.values())
