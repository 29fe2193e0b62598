"""A traced function as a flat list of operations over numbered values, with nothing left that feeds nothing."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

# Values of the same bytes under another shape or order; the compiler gives them no buffer of their own.
_VIEWS = {
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "copy",
    "copy_p",
    "name",
    "stop_gradient",
    "reshard",
    "sharding_constraint",
    "bitcast_convert_type",
    "random_wrap",
    "random_unwrap",
}
BARRIER = "optimization_barrier"
_LOOPS = ("scan", "while", "cond")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation.

    Attributes:
        name: JAX's name of the primitive.
        inputs, outputs: numbers of values; constants of the program text are not counted.
        bodies: of a loop or a branch, each with inputs `body_inputs`.
        num_consts, num_carry: of a scan or while loop, among its inputs (for a while loop the constants of both parts).
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bodies: "tuple[Program, ...]" = ()
    num_consts: int = 0
    num_carry: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Operations in the order of the trace.

    Attributes:
        num_bytes: of every value; num_elements likewise.
        inputs, outputs: numbers of values.
        operations: in order.
    """

    num_bytes: np.ndarray
    num_elements: np.ndarray
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operations: tuple[Operation, ...]


def flatten(closed: core.ClosedJaxpr) -> Program:
    """The program of a jaxpr (jax.make_jaxpr), its calls inlined and its dead code dropped."""
    return _Flattener().program(closed.jaxpr)


class _Flattener:
    """Numbers the values of one program; loops get a flattener of their own."""

    def __init__(self) -> None:
        self._num_bytes: list[int] = []
        self._num_elements: list[int] = []
        self._operations: list[Operation] = []

    def program(self, jaxpr: core.Jaxpr) -> Program:
        env: dict[Any, int] = {}
        for var in (*jaxpr.constvars, *jaxpr.invars):
            env[var] = self._new(var.aval)
        inputs = tuple(env[var] for var in jaxpr.invars)
        self._equations(jaxpr, env)
        outputs = tuple(env.get(var, -1) if isinstance(var, core.Var) else -1 for var in jaxpr.outvars)
        return Program(
            num_bytes=np.array(self._num_bytes, np.int64),
            num_elements=np.array(self._num_elements, np.int64),
            inputs=inputs,
            outputs=outputs,
            operations=tuple(_without_dead_code(self._operations, outputs)),
        )

    def _new(self, aval: Any) -> int:
        shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", jnp.dtype("float32"))
        num = int(np.prod(shape, dtype=np.int64))
        # A key of jax.random has an extended dtype; it is a few words.
        self._num_bytes.append(num * getattr(dtype, "itemsize", 8))
        self._num_elements.append(num)
        return len(self._num_bytes) - 1

    def _equations(self, jaxpr: core.Jaxpr, env: dict[Any, int]) -> None:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            inputs = [env[var] for var in eqn.invars if isinstance(var, core.Var)]
            called = None if name in _LOOPS else _called(eqn)
            if called is not None:
                self._inline(eqn, called, env)
            elif (name in _VIEWS or _keeps_bytes(eqn)) and len(inputs) == 1 and len(eqn.outvars) == 1:
                env[eqn.outvars[0]] = inputs[0]
            elif name == BARRIER:
                env.update(zip(eqn.outvars, (env.get(var, -1) for var in eqn.invars), strict=True))
                self._operations.append(Operation(name=BARRIER, inputs=tuple(inputs), outputs=()))
            else:
                outputs = tuple(self._new(var.aval) for var in eqn.outvars)
                env.update(zip(eqn.outvars, outputs, strict=True))
                self._operations.append(self._operation(eqn, tuple(inputs), outputs, env))

    def _operation(
        self, eqn: core.JaxprEqn, inputs: tuple[int, ...], outputs: tuple[int, ...], env: dict[Any, int]
    ) -> Operation:
        name, params = eqn.primitive.name, eqn.params
        if name not in _LOOPS:
            return Operation(name=name, inputs=inputs, outputs=outputs)
        # Positions matter here, so constants of the text keep a place: a value of their own.
        numbers = tuple(env[v] if isinstance(v, core.Var) else self._new(v.aval) for v in eqn.invars)
        if name == "scan":
            # By shapes, not by the parameters, which JAX's releases name differently: what is scanned over has one
            # axis more outside than inside.
            inside = _open(params["jaxpr"])
            carry = sum(_same_rank(*pair) for pair in zip(eqn.outvars, inside.outvars, strict=True))
            consts = sum(_same_rank(*pair) for pair in zip(eqn.invars, inside.invars, strict=True)) - carry
            bodies = (inside,)
        elif name == "while":
            bodies, consts = (params["body_jaxpr"],), params["cond_nconsts"] + params["body_nconsts"]
            carry = len(numbers) - consts
        else:
            bodies, numbers, consts, carry = params["branches"], numbers[1:], len(numbers) - 1, 0
        return Operation(
            name=name,
            inputs=numbers,
            outputs=outputs,
            bodies=tuple(_Flattener().program(_open(body)) for body in bodies),
            num_consts=consts,
            num_carry=carry,
        )

    def _inline(self, eqn: core.JaxprEqn, called: core.Jaxpr, env: dict[Any, int]) -> None:
        inner: dict[Any, int] = {}
        for var in called.constvars:
            inner[var] = self._new(var.aval)
        for outside, inside in zip(eqn.invars, called.invars, strict=True):
            inner[inside] = env[outside] if isinstance(outside, core.Var) else self._new(outside.aval)
        prevent = eqn.params.get("prevent_cse", False)
        if eqn.params.get("differentiated", False) and prevent:
            pinned = [True] * len(eqn.invars) if prevent is True else list(prevent)
            held = tuple(inner[var] for var, pin in zip(called.invars, pinned, strict=True) if pin)
            self._operations.append(Operation(name=BARRIER, inputs=held, outputs=()))
        self._equations(called, inner)
        for outer, result in zip(eqn.outvars, called.outvars, strict=True):
            env[outer] = inner[result] if isinstance(result, core.Var) else self._new(result.aval)


def _open(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _same_rank(outside: Any, inside: Any) -> bool:
    return len(outside.aval.shape) == len(inside.aval.shape)


def _called(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """The body of an equation that is a call, not an operation with a function as its parameter."""
    for value in eqn.params.values():
        if isinstance(value, core.ClosedJaxpr | core.Jaxpr) and not eqn.primitive.name.startswith("scatter"):
            jaxpr = _open(value)
            if len(jaxpr.invars) == len(eqn.invars) and len(jaxpr.outvars) == len(eqn.outvars):
                return jaxpr
    return None


def _keeps_bytes(eqn: core.JaxprEqn) -> bool:
    """Rounding to the precision that a value has already, or a conversion to its own dtype."""
    if eqn.primitive.name not in ("reduce_precision", "convert_element_type"):
        return False
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    return getattr(before, "dtype", None) == getattr(after, "dtype", None)


def _without_dead_code(operations: Sequence[Operation], outputs: Sequence[int]) -> list[Operation]:
    needed = set(outputs)

    def kept() -> Iterator[Operation]:
        for op in reversed(operations):
            if op.name == BARRIER:
                # It holds back what is needed, and needs nothing by itself.
                yield dataclasses.replace(op, inputs=tuple(v for v in op.inputs if v in needed))
            elif needed.intersection(op.outputs):
                needed.update(op.inputs)
                yield op

    return list(kept())[::-1]
