"""The ablation's cases, its resuming, and the sorting of kernels, without a GPU and without a model."""

import gzip
import json
import os
import pathlib
import subprocess
import sys

import pytest

from openpi_accel.accel.catalog import CATALOG
from openpi_accel.config.flags import Acceleration
from openpi_accel.errors import UserError
from openpi_accel.tools import ablate
from openpi_accel.tools.compare.runs import read_run
from openpi_accel.tools.trace_table import describe, time_by_kind
from tests.conftest import QUICK, REPO

# Stands in for scripts/bench.py: faster by 1 for each switch, and notes that it ran.
BENCH = """
import json, os, sys
on = sorted(n for n in os.environ if n.startswith("OPENPI_"))
open(sys.argv[1], "a").write(",".join(on) + " " + " ".join(sys.argv[2:]) + "\\n")
if "OPENPI_CAST_EARLY" in on and len(on) == 1:
    sys.exit("out of memory")
print(json.dumps({"samples_per_s": 10.0 + len(on), "step_s": 0.1, "peak_memory_gib": None, "temporaries_gib": 1.0}))
"""


def test_every_acceleration_is_a_case_alone_and_left_out() -> None:
    cases = ablate.all_cases({"XLA_FLAGS": "--xla_x=1"})
    assert cases["off"].environment == {} and cases["off"].arguments == ()
    for entry in CATALOG:
        assert cases[entry.name].environment == entry.environment
        if entry.in_opt:
            left = cases[f"without_{entry.name}"]
            assert not set(entry.environment) & set(left.environment) or entry.name.startswith("attention")
            assert not set(entry.arguments[::2]) & set(left.arguments)
    on = Acceleration.from_env({k: v for k, v in cases["on"].environment.items() if k.startswith("OPENPI_")})
    assert on.flash_attn and on.flash_impl == "auto" and on.unroll_layers and on.cast_early and on.batch_cameras
    assert cases["on"].environment["XLA_FLAGS"] and "XLA_FLAGS" not in cases["without_xla_options"].environment


def test_it_goes_on_with_what_is_missing(tmp_path: pathlib.Path) -> None:
    ran, results = tmp_path / "ran", tmp_path / "results.jsonl"
    command = [sys.executable, "-c", BENCH, str(ran)]
    cases = ablate.all_cases({})
    environment = {"OPENPI_SKIP_IMAGES": "auto"}  # the caller's own switches reach no case
    first = ablate.ablate(ablate.choose_cases("early_casts,one_vision_pass", cases), command, environment, results, 60)
    assert [row["case"] for row in first] == ["off", "early_casts", "one_vision_pass"]
    assert "out of memory" in first[1]["error"] and first[2]["times_baseline"] == pytest.approx(1.1)
    assert len(results.read_text().splitlines()) == 3

    again = ablate.choose_cases("early_casts,one_vision_pass,remat_dots", cases)
    rows = ablate.ablate(again, command, environment, results, 60)
    assert [line.split()[0:1] for line in ran.read_text().splitlines()[:1]] == [[]]  # off: no switch at all
    assert [row["case"] for row in rows[3:]] == ["off", "early_casts", "remat_dots"]  # done ones are not run again
    assert "--remat.gemma dots" in ran.read_text().splitlines()[-1]
    assert [json.loads(line)["case"] for line in results.read_text().splitlines()] == [row["case"] for row in rows]
    assert "one_vision_pass" in ablate.format_row(rows[2]) and "1.10 x" in ablate.format_row(rows[2])


def test_the_losses_of_a_benchmark_can_be_compared(tmp_path: pathlib.Path) -> None:
    """What --log writes is a run's log to compare_runs.py."""
    log = tmp_path / "off.jsonl"
    script = str(REPO / "scripts" / "bench.py")
    options = ["--model.max-token-len=8", "--batch-size=2", "--steps=1", f"--log={log}"]
    command = [sys.executable, script, "pi05_demo", *options]
    done = subprocess.run(command, env=os.environ | QUICK, capture_output=True, text=True, check=True)
    result, run = json.loads(done.stdout), read_run(log)
    assert run.steps == [0, 1, 2, 3] and run.series("loss")[1][3] == result["losses"][1]
    assert {"grad_norm", "param_norm", "learning_rate"} <= set(run.rows[0]) and "log" not in result


def test_an_unknown_case_is_named() -> None:
    with pytest.raises(UserError, match="'fast', which is none of off, on"):
        ablate.choose_cases("fast", ablate.all_cases({}))


def test_kernels_are_sorted_by_what_they_do() -> None:
    hlo = """
%fused_gelu (p: bf16[8]) -> bf16[8] {
  %p = bf16[8]{0} parameter(0)
  ROOT %t.1 = bf16[8]{0} tanh(%p)
}

%fused_norm (p: bf16[8]) -> f32[] {
  %p = bf16[8]{0} parameter(0)
  ROOT %r.1 = f32[] reduce(%p, %c), dimensions={0}
}

ENTRY %main (x: bf16[8]) -> bf16[8] {
  %loop_multiply_fusion.3 = bf16[8]{0} fusion(%x), calls=%fused_gelu, metadata={op_name="jit(step)/jvp()/mul"}
  %input_reduce_fusion = f32[] fusion(%x), kind=kInput, calls=%fused_norm, metadata={op_name="jit(step)/jvp()/sum"}
  ROOT %loop_add_fusion.1 = bf16[8]{0} fusion(%x), kind=kLoop, calls=%fused_norm, metadata={op_name="jit(step)/add"}
}
"""
    rows = [
        {"name": "nvjet_sm90_tst_128x256", "ms": 5.0},
        {"name": "loop_multiply_fusion_3", "ms": 3.0},
        {"name": "input_reduce_fusion", "ms": 2.0},
        {"name": "loop_add_fusion_1", "ms": 1.0},
        {"name": "memcpy128", "ms": 0.5},
    ]
    assert time_by_kind(rows, hlo) == {
        "products": 5.0,
        "MLP activations": 3.0,
        "normalisations and bias gradients": 2.0,
        "optimizer, average, norms": 1.0,
        "unnamed": 0.5,
    }


def test_communication_that_nothing_hides_is_told(tmp_path: pathlib.Path) -> None:
    def kernel(name: str, start: float, ms: float, stream: int = 1, device: int = 0) -> dict[str, object]:
        return {"ph": "X", "name": name, "pid": device, "tid": stream, "ts": 1000 * start, "dur": 1000 * ms, "args": {}}

    events = [
        *({"name": "process_name", "pid": i, "args": {"name": f"/device:GPU:{i}"}} for i in range(2)),
        *(
            {"name": "thread_name", "pid": i, "tid": t, "args": {"name": f"Stream #{t}"}}
            for i in range(2)
            for t in (1, 2)
        ),
        kernel("gemm_a", 0, 4),
        kernel("ncclDevKernel_AllReduce", 3, 4, stream=2),  # 1 ms beside the first product, 1 ms beside the second
        kernel("gemm_b", 6, 2),
        kernel("ncclDevKernel_AllGather", 9, 2, stream=2),  # alone
        kernel("ncclDevKernel_AllGather", 9, 50, stream=2, device=1),  # another GPU's
    ]
    with gzip.open(tmp_path / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    lines = [line.split(maxsplit=2) for line in describe(tmp_path, "", num_steps=2)]
    assert lines == [
        ["3.0", "ms", "products"],
        ["3.0", "ms", "communication"],
        ["2.0", "ms", "of communication with nothing beside it"],
    ]
