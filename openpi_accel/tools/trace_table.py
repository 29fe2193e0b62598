"""Places the GPU time of a profiler trace, kernel by kernel and by what the kernels do, without a viewer."""

import gzip
import json
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

_COMMUNICATION = "nccl"
_COMPUTATION = re.compile(r"^%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?\s([\w\-]+)\(")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_OF_THE_STEP = re.compile(r"^jit\(step\)/[^/(]+$")  # outside the loss: optimizer, averages, norms


def describe(trace_dir: pathlib.Path, hlo: str, num_steps: int) -> list[str]:
    """Lines for people: what the first GPU does in a step and for how long, of a trace of so many."""
    kernels = _kernels(trace_dir)
    lines = [f"{ms / num_steps:9.1f} ms  {kind}" for kind, ms in time_by_kind(_rows(kernels), hlo).items()]
    sending, alone = _communication_ms(kernels)
    return [*lines, f"{alone / num_steps:9.1f} ms  of communication with nothing beside it"] if sending else lines


def _rows(kernels: Iterable[Row]) -> list[Row]:
    """Equal kernels together, longest first: name, op (of the compiled program), source (JAX's name), count, ms."""
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for event in kernels:
        args = event.get("args", {})
        key = (event["name"], str(args.get("hlo_op", "")), str(args.get("tf_op", args.get("name", ""))))
        sums[key][0] += 1
        sums[key][1] += event["dur"] / 1000
    rows = [
        {"name": name, "op": op, "source": source, "count": int(count), "ms": ms}
        for (name, op, source), (count, ms) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def _communication_ms(kernels: Sequence[Row]) -> tuple[float, float]:
    """Time in which a GPU is sending or receiving, and the part of it in which it does nothing else."""
    sending = [event for event in kernels if _COMMUNICATION in event["name"]]
    rest = [event for event in kernels if _COMMUNICATION not in event["name"]]
    return _covered_ms(sending), _covered_ms(kernels) - _covered_ms(rest)


def _covered_ms(events: Iterable[Row]) -> float:
    """Length of the union of the events' intervals."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered / 1000


def _kernels(trace_dir: pathlib.Path) -> list[Row]:
    """Events of the first GPU's streams, times in microseconds; none without a trace."""
    files = sorted(trace_dir.rglob("*.trace.json.gz"))
    if not files:
        return []
    events = json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
    devices = {e["pid"] for e in events if e.get("name") == "process_name" and "GPU:0" in str(e["args"].get("name"))}
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and e["pid"] in devices and "Stream" in str(e["args"].get("name"))
    }
    return [e for e in events if e.get("ph") == "X" and (e.get("pid"), e.get("tid")) in streams]


def time_by_kind(rows: Iterable[Row], hlo: str) -> dict[str, float]:
    """Kind of work -> ms, longest first.

    Args:
        rows: kernels by name, with their ms.
        hlo: the text of the compiled program; a fusion's kernel has the fusion's name there.
    """
    bodies, names = _fusions(hlo)
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        fusion = re.sub(r"_(\d+)$", r".\1", row["name"])
        fusion = fusion if fusion in bodies else row["name"]
        sums[_kind(row["name"], bodies.get(fusion, frozenset()), names.get(fusion, ""))] += row["ms"]
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _kind(kernel: str, opcodes: frozenset[str], op_name: str) -> str:
    if _COMMUNICATION in kernel:
        return "communication"  # beside the others, for the most part
    if re.search(r"nvjet|gemm|cutlass|xmma", kernel):
        return "products"
    if re.search(r"sdpa|fmha|cudnn", kernel):
        return "attention"
    if _OF_THE_STEP.match(op_name):
        return "optimizer, average, norms"
    if "tanh" in opcodes:
        return "MLP activations"
    if "reduce" in opcodes:
        return "normalisations and bias gradients"
    if op_name.endswith("jvp()/slice"):
        return "weights: slices and casts"
    if opcodes and opcodes <= {"parameter", "concatenate", "slice", "transpose", "copy", "bitcast", "convert", "pad"}:
        return "copies"
    if "scatter" in opcodes or "scatter" in op_name:
        return "embedding gradient"
    return "elementwise rest" if opcodes else "unnamed"


def _fusions(hlo: str) -> tuple[dict[str, frozenset[str]], dict[str, str]]:
    """Fusion -> the operations in it, and -> JAX's name of it."""
    inside: dict[str, set[str]] = defaultdict(set)
    calls: dict[str, str] = {}
    names: dict[str, str] = {}
    computation = ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        elif match := _INSTRUCTION.match(line):
            inside[computation].add(match[2])
            if match[2] == "fusion" and (called := _CALLS.search(line)):
                calls[match[1]] = called[1]
                names[match[1]] = name[1] if (name := _OP_NAME.search(line)) else ""
    return {fusion: frozenset(inside[called]) for fusion, called in calls.items()}, names
