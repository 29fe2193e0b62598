"""What a compiled program sends between devices: its collectives, read from the text of its optimised HLO."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
# name = type kind(…: a tuple's type is in parentheses; the longest comments in it are /*index=5*/.
_COLLECTIVE = re.compile(rf" = (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
_BITS = re.compile(r"[0-9]+")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"([0-9]+)"\}')
_GROUPS_LISTED = re.compile(r"replica_groups=\{\{([0-9,]+)\}")
_GROUPS_IOTA = re.compile(r"replica_groups=\[[0-9]+,([0-9]+)\]<=")
_GROUPS_MESH = re.compile(r"replica_groups=@?[\w.]*mesh\[([^\]]*)\] ?\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective operation of a program.

    Attributes:
        kind: one of KINDS.
        results: dtype and shape of what each device has afterwards; several where the compiler merged operations.
        group_size: devices that exchange with each other.
        in_loop: it stands in the body of a loop.
        times: how often one run executes it; a loop whose length is not known counts once.
    """

    kind: str
    results: tuple[tuple[str, tuple[int, ...]], ...]
    group_size: int
    in_loop: bool
    times: int

    @property
    def result_bytes(self) -> int:
        """Of one execution, on one device."""
        return sum(_bits(dtype) * math.prod(shape) for dtype, shape in self.results) // 8

    @property
    def sent_bytes(self) -> float:
        """What one device sends in one run of the program where the operation is done by a ring."""
        others = self.group_size - 1
        share = {
            "all-gather": others / self.group_size,
            "all-reduce": 2 * others / self.group_size,
            "reduce-scatter": float(others),  # of the result, which is one part of what is reduced
            "all-to-all": others / self.group_size,
            "collective-permute": 1.0,
        }[self.kind]
        return self.times * self.result_bytes * share


def read_collectives(hlo: str) -> list[Collective]:
    """The collectives that a run of the program executes, in the order of the text.

    Args:
        hlo: `compiled.as_text()`.

    Raises:
        ValueError: a collective whose devices cannot be read.
    """
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            lines = bodies.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        else:
            lines.append(line)
    times = _executions(bodies, entry)
    found = []
    for name, body in bodies.items():
        if name not in times:
            continue
        for line in body:
            if match := _COLLECTIVE.search(line):
                count, in_loop = times[name]
                found.append(_collective(line, match, count, in_loop))
    return found


def _executions(bodies: Mapping[str, list[str]], entry: str) -> dict[str, tuple[int, bool]]:
    """Computation -> how often a run executes it, and whether in a loop. Called by several, the sum counts."""
    calls = {name: list(_calls(body, bodies)) for name, body in bodies.items()}
    order, seen = [], set()

    def visit(name: str) -> None:
        if name not in seen:
            seen.add(name)
            for callee, _, _ in calls[name]:
                visit(callee)
            order.append(name)

    visit(entry)
    times: dict[str, int] = collections.Counter({entry: 1})
    in_loop: dict[str, bool] = collections.defaultdict(bool)
    for name in reversed(order):  # callers first
        for callee, trips, loop in calls[name]:
            times[callee] += times[name] * trips
            in_loop[callee] |= in_loop[name] or loop
    return {name: (times[name], in_loop[name]) for name in order}


def _calls(body: list[str], bodies: Mapping[str, list[str]]) -> Iterator[tuple[str, int, bool]]:
    """(computation, times per execution of the caller, as a loop)."""
    for line in body:
        loop = " while(" in line
        trips = _TRIPS.search(line) if loop else None
        names = _CALLED.findall(line)
        for listed in _BRANCHES.findall(line):
            names += [name.strip().lstrip("%") for name in listed.split(",")]
        yield from ((name, int(trips[1]) if trips else 1, loop) for name in names if name in bodies)


def _collective(line: str, match: re.Match[str], times: int, in_loop: bool) -> Collective:
    kind = match[2]
    results = [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(match[1])]
    # An asynchronous start also returns what it was given, before the results; that of a sum does so only where what it
    # was given stands in parentheses of its own.
    if match[3] and (kind != "all-reduce" or match[1].startswith("((")):
        results = [r for r in results if r != ("u32", ())]
        results = results[len(results) // 2 :]
    return Collective(
        kind=kind, results=tuple(results), group_size=_group_size(line, kind), in_loop=in_loop, times=times
    )


def _group_size(line: str, kind: str) -> int:
    if match := _GROUPS_LISTED.search(line):
        return len(match[1].split(","))
    if match := _GROUPS_IOTA.search(line):
        return int(match[1])
    if match := _GROUPS_MESH.search(line):
        sizes = {name.strip(" '"): int(size) for name, size in (part.split("=") for part in match[1].split(","))}
        return math.prod(sizes[axis.strip(" '")] for axis in match[2].split(","))
    if kind == "collective-permute" and _PAIRS.search(line):
        return 2
    raise ValueError(f"cannot read which devices take part: {line.strip()[:300]}")


def _bits(dtype: str) -> int:
    digits = _BITS.search(dtype)
    return int(digits[0]) if digits else 8  # pred is stored in a byte
