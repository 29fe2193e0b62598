"""Trees of arrays on disk, in Orbax's layout: what is in a folder, and reading chosen leaves straight to their shards.

Upstream's parameter leaves sit under an extra last key `value` (from Flax), all of them or none.
"""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from openpi_accel.errors import UserError
from openpi_accel.orbax_noise import keep_orbax_quiet

# Bounds the host memory of a restore. It must exceed the largest leaf (4.5 GiB, the stacked MLP of Gemma 2B).
_RESTORE_CONCURRENT_GB = 16


def is_tree_folder(folder: pathlib.Path) -> bool:
    """Whether `folder` itself holds one Orbax tree."""
    return (folder / "_METADATA").is_file()


def stored_leaves(folder: pathlib.Path) -> dict[str, Any]:
    """Path -> metadata with `shape` and `dtype`, for every array in `folder`; reads no array.

    Raises:
        UserError: the folder holds no readable Orbax tree.
    """
    return {path: leaf for path, leaf in by_path(_metadata(folder)).items() if hasattr(leaf, "shape")}


def read_leaves(folder: pathlib.Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads the leaves named by `targets`, each in the target's dtype and straight to the target's sharding.

    The caller has compared names and shapes with `stored_leaves`.

    Raises:
        UserError: the folder is damaged.
    """
    keep_orbax_quiet()
    metadata = _metadata(folder)
    paths, treedef = _flatten_with_path(metadata)
    item = jax.tree.unflatten(treedef, [targets.get(path, ocp.PLACEHOLDER) for path in paths])
    restore_args = jax.tree.unflatten(treedef, [_restore_args(targets.get(path)) for path in paths])
    try:
        restored = _handler().restore(
            folder.resolve(), args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
        )
    except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
        raise _damaged(folder, error) from error
    leaves = by_path(restored)
    return {path: leaves[path] for path in targets}


def plain_paths(paths: Iterable[str]) -> dict[str, str]:
    """Path without the last key `value` -> path as stored.

    The key is dropped only where every path ends in it: SigLIP's attention has a projection of that name.
    """
    paths = list(paths)
    if paths and all(path.endswith("/value") for path in paths):
        return {path.removesuffix("/value"): path for path in paths}
    return {path: path for path in paths}


def by_path(tree: Any) -> dict[str, Any]:
    """Leaves by their keys, joined with slashes: dict keys, indices and attribute names alike."""
    paths, _ = _flatten_with_path(tree)
    return dict(zip(paths, jax.tree.leaves(tree), strict=True))


def _flatten_with_path(tree: Any) -> tuple[list[str], Any]:
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs], treedef


def _handler() -> ocp.PyTreeCheckpointHandler:
    return ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_RESTORE_CONCURRENT_GB)


def _metadata(folder: pathlib.Path) -> Any:
    if not is_tree_folder(folder):
        raise UserError(
            f"{folder} holds no Orbax checkpoint (it has no _METADATA file). Give the folder that "
            "holds _METADATA, or a checkpoint folder with params/ in it."
        )
    try:
        return _handler().metadata(folder.resolve()).tree
    except Exception as error:
        raise _damaged(folder, error) from error


def _damaged(folder: pathlib.Path, error: BaseException) -> UserError:
    while error.__cause__ is not None:  # Orbax wraps TensorStore's one line in a page of its own
        error = error.__cause__
    lines = str(error).splitlines() or [type(error).__name__]
    return UserError(
        f"{folder} could not be read: {lines[0][:300]}. The files are damaged or incomplete: copy them again."
    )


def _restore_args(target: jax.ShapeDtypeStruct | None) -> ocp.RestoreArgs:
    if target is None:
        return ocp.RestoreArgs()
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array, sharding=target.sharding, dtype=target.dtype, global_shape=target.shape
    )
