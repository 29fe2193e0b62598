"""Sums the GPU kernels of a profiler trace by name, so that time can be placed without a viewer."""

import gzip
import json
import pathlib
from collections import defaultdict
from typing import Any

Row = dict[str, Any]


def kernel_rows(trace_dir: pathlib.Path) -> list[Row]:
    """Kernels of the first GPU, longest first: name, op (of the compiled program), source (JAX's name), count, ms."""
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
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.get("ph") != "X" or (event.get("pid"), event.get("tid")) not in streams:
            continue
        args = event.get("args", {})
        key = (event["name"], str(args.get("hlo_op", "")), str(args.get("tf_op", args.get("name", ""))))
        sums[key][0] += 1
        sums[key][1] += event["dur"] / 1000
    rows = [
        {"name": name, "op": op, "source": source, "count": int(count), "ms": ms}
        for (name, op, source), (count, ms) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])
