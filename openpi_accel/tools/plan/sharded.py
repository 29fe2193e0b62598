"""Which values of a program lie as the sharded parameters do: what is computed from them or into them, one to one."""

import dataclasses
from collections.abc import Collection, Mapping

from openpi_accel.tools.plan.program import Operation, Program

_ONE_TO_MANY = {"slice", "dynamic_slice", "split", "unstack", "concatenate", "stack", "pad"}
_MIXING = (
    *("dot_general", "conv_general", "gather", "reduce_", "arg", "cum", "sort", "top_k", "rng", "random"),
    *("cond", "while"),
)
_UPDATES = {"scatter", "scatter-add", "dynamic_update_slice"}
Key = tuple[tuple[int, ...], int]


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The sharded values of a program, and of its loops' bodies: operation -> one per body."""

    values: frozenset[int]
    bodies: Mapping[int, "tuple[Sharded, ...]"]


def spread(program: Program, sharded_inputs: Collection[int]) -> Sharded:
    """From the parameters to everything that has their layout: their casts and slices, gradients, moments.

    Args:
        program: from `flatten`.
        sharded_inputs: its inputs that are sharded.
    """
    groups = _Groups()
    _join(program, (), groups)
    marked = {groups.root(((), value)) for value in sharded_inputs}
    return _collect(program, (), groups, marked)


class _Groups:
    """Disjoint sets."""

    def __init__(self) -> None:
        self._parent: dict[Key, Key] = {}

    def root(self, key: Key) -> Key:
        path = [key]
        while (parent := self._parent.get(path[-1], path[-1])) != path[-1]:
            path.append(parent)
        for visited in path:
            self._parent[visited] = path[-1]
        return path[-1]

    def join(self, one: Key, other: Key) -> None:
        self._parent[self.root(one)] = self.root(other)


def _join(program: Program, where: tuple[int, ...], groups: _Groups) -> None:
    sizes = program.num_elements
    for index, op in enumerate(program.operations):
        if op.name == "scan":
            _join_scan(op, index, where, groups)
        elif op.name in _ONE_TO_MANY:
            for value in (*op.inputs[:1], *op.outputs) if len(op.outputs) > 1 else (*op.inputs, *op.outputs):
                groups.join((where, value), (where, op.outputs[0]))
        elif op.name in _UPDATES:
            groups.join((where, op.inputs[0]), (where, op.outputs[0]))
        elif op.outputs and not op.name.startswith(_MIXING):
            for value in op.inputs:
                if sizes[value] == sizes[op.outputs[0]]:
                    groups.join((where, value), (where, op.outputs[0]))


def _join_scan(op: Operation, index: int, where: tuple[int, ...], groups: _Groups) -> None:
    (body,) = op.bodies
    inside = (*where, index)
    _join(body, inside, groups)
    for outer, inner in (*zip(op.inputs, body.inputs, strict=True), *zip(op.outputs, body.outputs, strict=True)):
        if inner >= 0:
            groups.join((where, outer), (inside, inner))
    for before, after in zip(op.inputs[op.num_consts :], op.outputs[: op.num_carry], strict=False):
        groups.join((where, before), (where, after))


def _collect(program: Program, where: tuple[int, ...], groups: _Groups, marked: set[Key]) -> Sharded:
    bodies = {
        index: tuple(_collect(body, (*where, index), groups, marked) for body in op.bodies)
        for index, op in enumerate(program.operations)
        if op.bodies
    }
    values = frozenset(value for value in range(len(program.num_bytes)) if groups.root((where, value)) in marked)
    return Sharded(values=values, bodies=bodies)
