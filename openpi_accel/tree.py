"""Parameter trees by path: nested dicts of leaves, a path being the keys joined with slashes."""

from collections.abc import Callable, Mapping
from typing import Any

Tree = dict[str, Any]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Path -> leaf, in sorted order (the order in which JAX walks a dict). Empty dicts vanish."""
    flat: dict[str, Any] = {}
    for key in sorted(tree):
        path = f"{prefix}{key}"
        if isinstance(tree[key], Mapping):
            flat |= flatten(tree[key], f"{path}/")
        else:
            flat[path] = tree[key]
    return flat


def unflatten(flat: Mapping[str, Any]) -> Tree:
    """The inverse of `flatten`."""
    tree: Tree = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def split(tree: Mapping[str, Any], predicate: Callable[[str], bool]) -> tuple[Tree, Tree]:
    """The leaves whose path fulfils `predicate`, and the others, each as a tree without empty branches."""
    flat = flatten(tree)
    chosen = {path: leaf for path, leaf in flat.items() if predicate(path)}
    return unflatten(chosen), unflatten({path: leaf for path, leaf in flat.items() if path not in chosen})


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> Tree:
    """One tree of two with different paths; undoes `split`."""
    return unflatten(dict(sorted((flatten(first) | flatten(second)).items())))
