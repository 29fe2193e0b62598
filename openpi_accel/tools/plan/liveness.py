"""Bytes in use while a program runs, by the lifetimes of its values.

What XLA does with such a program on a GPU, as far as memory goes: arithmetic element by element is computed inside the
kernels that read it and gets no buffer, unless a kernel reads it that cannot compute (a product, a slice, a loop, a
barrier); everything but products and reductions is put off until it is needed; an updated parameter overwrites the old.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from openpi_accel.tools.plan.program import BARRIER, Operation, Program
from openpi_accel.tools.plan.sharded import Sharded

_PRODUCT = "dot_general"
# They read finished buffers.
_LOOPS = ("scan", "while", "cond")
_KERNELS = {
    _PRODUCT,
    "conv_general_dilated",
    "gather",
    "scatter",
    "scatter-add",
    "dynamic_update_slice",
    "sort",
    "top_k",
    *_LOOPS,
}
# They compute what they read on the way.
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin", "cum")
_SLICES = {"slice", "dynamic_slice", "split", "unstack"}
_JOINS = {"concatenate", "stack"}
# They write into their first operand where nobody else needs it.
_UPDATES = {"scatter", "scatter-add", "dynamic_update_slice"}
# A kernel of a sharded parameter needs it whole; these do not.
_NOT_GATHERED = {"gather", *_LOOPS}
# Smaller values are not followed: there are thousands, together a few MiB.
_MIN_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Bytes in use at each moment, by kind; arrays of one length.

    Attributes:
        whole: of values that each device holds whole, or its own samples of.
        sharded: of values that lie as the parameters do: their bytes before sharding.
        gathered: of those among them that a kernel needs whole at this moment.
    """

    whole: np.ndarray
    sharded: np.ndarray
    gathered: np.ndarray


def timeline(
    program: Program,
    *,
    free: Collection[int],
    sharded: Sharded,
    kernels: Collection[str] = (),
    sizes: Program | None = None,
) -> Timeline:
    """Follows the values of a program from birth to last use. Its inputs are not counted.

    Args:
        program: from `flatten`.
        free: outputs that overwrite inputs.
        sharded: which values lie as sharded parameters do.
        kernels: primitives beside the known ones that are kernels of their own.
        sizes: the same program traced at another batch, whose bytes are to be counted.
    """
    num_bytes = (sizes or program).num_bytes
    lifetimes = _Lifetimes(program, frozenset(free), frozenset(kernels))
    length = len(lifetimes.order)
    change = np.zeros((length + 1, 2), np.int64)
    for value, start in lifetimes.start.items():
        kind = int(value in sharded.values)
        change[start, kind] += num_bytes[value]
        change[lifetimes.stop[value] + 1, kind] -= num_bytes[value]
    in_use = np.cumsum(change[:-1], axis=0)
    moments: list[np.ndarray] = []
    for position, index in enumerate(lifetimes.order):
        op = program.operations[index]
        gathered = 0
        if _is_kernel(op, lifetimes.kernels) and op.name not in _NOT_GATHERED:
            touched = lifetimes.sources(op.inputs) | set(op.outputs)
            gathered = sum(int(num_bytes[v]) for v in touched | set(op.inputs) if v in sharded.values)
        now = np.array([[*in_use[position], gathered]])
        moments.append(now)
        for number, body in enumerate(op.bodies):
            carried = frozenset(body.outputs[: op.num_carry])
            inner = timeline(
                body,
                free=carried,
                sharded=sharded.bodies[index][number],
                kernels=kernels,
                sizes=None if sizes is None else sizes.operations[index].bodies[number],
            )
            moments.append(now + np.stack([inner.whole, inner.sharded, inner.gathered], axis=1))
    table = np.concatenate(moments) if moments else np.zeros((0, 3), np.int64)
    return Timeline(whole=table[:, 0], sharded=table[:, 1], gathered=table[:, 2])


class _Lifetimes:
    """Which values get a buffer, the order of the operations, and from when to when each buffer lives.

    Attributes:
        order: indices of operations as they run.
        start, stop: of each buffer, positions in `order`, both included.
    """

    def __init__(self, program: Program, free: frozenset[int], kernels: frozenset[str]) -> None:
        self.kernels = kernels
        self._program, self._free = program, free
        self._buffered = set(self._choose_buffered())
        self._sources: dict[int, frozenset[int]] = {}
        self._trace_sources()
        self.order = list(self._schedule())
        self.start: dict[int, int] = {}
        self.stop: dict[int, int] = {}
        self._walk()

    def sources(self, values: Sequence[int]) -> set[int]:
        """The buffers out of which these values are computed."""
        return set().union(*(self._sources.get(value, frozenset()) for value in values))

    def _choose_buffered(self) -> Iterator[int]:
        forced = {value for value in self._program.outputs if value not in self._free}
        for op in self._program.operations:
            if _is_kernel(op, self.kernels) or op.name in _SLICES or op.name == BARRIER:
                forced.update(op.inputs)
        for op in self._program.operations:
            always = _is_anchor(op, self.kernels) or op.name in _JOINS
            yield from (value for value in op.outputs if always or value in forced)

    def _trace_sources(self) -> None:
        for op in self._program.operations:
            read = frozenset(self.sources(op.inputs))
            for value in op.outputs:
                if value not in self._buffered and value not in self._free:
                    self._sources[value] = read
                elif self._is_followed(value):
                    self._sources[value] = frozenset((value,))

    def _is_followed(self, value: int) -> bool:
        large = bool(self._program.num_bytes[value] >= _MIN_BYTES)
        return large and value in self._buffered and value not in self._free

    def _schedule(self) -> Iterator[int]:
        """Kernels in the program's order; before each, what it needs of the rest; with that, what one kernel computes
        in the same pass."""
        operations = self._program.operations
        maker = {value: index for index, op in enumerate(operations) for value in op.outputs}
        companions = self._companions()
        done: set[int] = set()

        def with_needs(last: int) -> Iterator[int]:
            stack = [(last, False)]
            while stack:
                index, ready = stack.pop()
                if index in done:
                    continue
                if not ready:
                    stack.append((index, True))
                    needs = {maker[value] for value in operations[index].inputs if value in maker}
                    stack += [(need, False) for need in sorted(needs, reverse=True) if need not in done]
                    continue
                done.add(index)
                yield index
                for other in companions.get(index, ()):
                    read = self.sources(operations[other].inputs)
                    if other not in done and all(maker[value] in done for value in read):
                        stack.append((other, False))

        for index, op in enumerate(operations):
            if _is_anchor(op, self.kernels):
                yield from with_needs(index)
        for index in range(len(operations)):
            yield from with_needs(index)

    def _companions(self) -> dict[int, list[int]]:
        """Arithmetic -> other arithmetic over as many elements that reads one of its buffers, no barrier between them:
        they are one kernel with several results."""
        readers: dict[tuple[int, int, int], list[int]] = {}
        keys: dict[int, list[tuple[int, int, int]]] = {}
        segment = 0
        for index, op in enumerate(self._program.operations):
            segment += op.name == BARRIER
            if _is_arithmetic(op, self.kernels) and self._is_followed(op.outputs[0]):
                size = int(self._program.num_elements[op.outputs[0]])
                keys[index] = [(segment, size, source) for source in self.sources(op.inputs)]
                for key in keys[index]:
                    readers.setdefault(key, []).append(index)
        return {
            index: sorted({other for key in of_index for other in readers[key]} - {index})
            for index, of_index in keys.items()
        }

    def _walk(self) -> None:
        sliced_from: dict[int, set[int]] = {}
        for position, index in enumerate(self.order):
            op = self._program.operations[index]
            read = self.sources(op.inputs)
            if op.name in _SLICES:
                whole = read.union(*(sliced_from.get(value, set()) for value in op.inputs))
                sliced_from |= dict.fromkeys(op.outputs, whole)
            elif op.name == _PRODUCT:  # it reads a slice where it lies; the copy is for others
                read = read.union(*(sliced_from.get(value, set()) for value in op.inputs))
            buffers = [value for value in op.outputs if self._is_followed(value)]
            writes = bool(buffers) or op.name == BARRIER or any(v in self._free for v in op.outputs)
            if writes or _is_anchor(op, self.kernels):
                for value in read:
                    self.stop[value] = position
            self.start |= dict.fromkeys(buffers, position)
            self.stop |= dict.fromkeys(buffers, position)
        for source in self.sources([v for v in self._program.outputs if v not in self._free]):
            self.stop[source] = len(self.order) - 1
        self._reuse()

    def _reuse(self) -> None:
        """What is written in place takes over its operand's buffer, where that ends here."""
        num_bytes = self._program.num_bytes
        for position, index in enumerate(self.order):
            op = self._program.operations[index]
            for value, operands in self._in_place(op):
                ending = (v for v in self.sources(operands) if self.stop.get(v) == position)
                old = next((v for v in ending if num_bytes[v] == num_bytes[value]), None)
                if old is None or self.start.get(value) != position:
                    continue
                if self.stop[value] == position:
                    del self.start[value], self.stop[value]
                else:
                    self.start[value] = position + 1

    def _in_place(self, op: Operation) -> Iterator[tuple[int, Sequence[int]]]:
        """Outputs, each with the operands over which it may be written."""
        if op.name in _LOOPS:
            carried = op.inputs[op.num_consts : op.num_consts + op.num_carry]
            yield from ((new, (old,)) for old, new in zip(carried, op.outputs, strict=False))
        elif op.name in _UPDATES:
            yield op.outputs[0], op.inputs[:1]
        elif _is_arithmetic(op, self.kernels):
            yield from ((new, op.inputs) for new in op.outputs[:1])


def _is_kernel(op: Operation, further: Collection[str]) -> bool:
    return op.name in _KERNELS or op.name in further


def _is_anchor(op: Operation, further: Collection[str]) -> bool:
    return _is_kernel(op, further) or op.name == BARRIER or op.name.startswith(_REDUCTIONS)


def _is_arithmetic(op: Operation, further: Collection[str]) -> bool:
    return not _is_anchor(op, further) and op.name not in _JOINS | _SLICES
