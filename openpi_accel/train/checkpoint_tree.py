"""A TrainState as the two trees that upstream stores, params and train_state, and back.

params/ holds the averaged weights, train_state/params the raw ones; without averaging params/ holds the raw ones and
train_state/params is empty. Parameter-shaped leaves get an extra last key `value`, as upstream's have.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from openpi_accel.errors import UserError
from openpi_accel.orbax_tree import by_path, read_leaves, stored_leaves
from openpi_accel.types import TrainState

_MAX_NAMES = 20


def to_items(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    """(params, train_state) as they are stored. Leaves may be arrays or shapes."""
    averaged = state.ema_params is not None
    params = {"params": _with_value_keys(state.ema_params if averaged else state.params)}
    train_state = {
        "step": state.step,
        "params": _with_value_keys(state.params) if averaged else {},
        "model_def": None,  # upstream's tree has these two keys without an array
        "ema_params": None,
        "opt_state": jax.tree.map(
            lambda node: _with_value_keys(node) if isinstance(node, dict) else node,
            state.opt_state,
            is_leaf=lambda node: isinstance(node, dict),
        ),
    }
    return params, train_state


def read_state(folder: pathlib.Path, target: TrainState) -> TrainState:
    """Reads a checkpoint folder straight to the shards of `target` (jax.ShapeDtypeStruct leaves with shardings).

    Raises:
        UserError: the checkpoint is of another model, optimizer, average or freeze setting, or damaged.
    """
    params_item, train_state_item = to_items(target)
    stored = {name: stored_leaves(folder / name) for name in ("params", "train_state")}
    averaged = target.ema_params is not None
    _check_average(folder, stored["train_state"], averaged)
    params = _read(folder / "params", params_item, stored["params"])
    train_state = _read(folder / "train_state", train_state_item, stored["train_state"])
    raw = train_state["params"] if averaged else params
    return TrainState(
        step=train_state["step"],
        params=_like(target.params, raw),
        opt_state=_like(target.opt_state, train_state["opt_state"]),
        ema_params=_like(target.ema_params, params) if averaged else None,
    )


def _with_value_keys(params: Any) -> Any:
    return jax.tree.map(lambda leaf: {"value": leaf}, params)


def _like(target: Any, item: Any) -> Any:
    """The leaves of `item`, which has the same ones in the same order, in the structure of `target`."""
    return jax.tree.unflatten(jax.tree.structure(target), jax.tree.leaves(item))


def _read(folder: pathlib.Path, item: Any, stored: Mapping[str, Any]) -> Any:
    wanted = by_path(item)
    # The key `value` is all ours here, so a stored tree without it is found by dropping it.
    raw = {name: name if name in stored else name.removesuffix("/value") for name in wanted}
    missing = [name for name in wanted if raw[name] not in stored]
    extra = sorted(set(stored) - set(raw.values()))
    if missing or extra:
        raise UserError(
            f"{folder} does not fit this run."
            + _names("It lacks", missing)
            + _names("It also has", extra)
            + "\nThe model, the optimizer or what is frozen (--freeze) was different when it was saved. Resume with "
            "the settings of then, or start a run of its own with --weight-loader.params-path."
        )
    wrong = [
        f"{name}: saved {tuple(stored[raw[name]].shape)}, now {tuple(leaf.shape)}"
        for name, leaf in wanted.items()
        if tuple(stored[raw[name]].shape) != tuple(leaf.shape)
    ]
    if wrong:
        raise UserError(f"{folder} is of a model of other sizes." + _names("Other shapes:", wrong))
    leaves = read_leaves(folder, {raw[name]: leaf for name, leaf in wanted.items()})
    return jax.tree.unflatten(jax.tree.structure(item), [leaves[raw[name]] for name in wanted])


def _check_average(folder: pathlib.Path, stored: Mapping[str, Any], averaged: bool) -> None:
    was_averaged = any(name.startswith("params/") for name in stored)
    if averaged and not was_averaged:
        raise UserError(f"{folder} was saved without averaged weights: resume with --ema-decay None.")
    if was_averaged and not averaged:
        raise UserError(f"{folder} was saved with averaged weights: resume with the --ema-decay of then, not None.")


def _names(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f"\n    … and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"\n{what}:\n    " + "\n    ".join(names[:_MAX_NAMES]) + more
