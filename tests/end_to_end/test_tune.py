"""Real trials of the demo's model on the CPU: searched, interrupted, refused, and read by run_opt.sh."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.conftest import COMPILING, QUICK, REPO
from tests.end_to_end.test_launchers import Started, assert_refused, launch, stand_in

__all__ = ["stand_in"]
MINUTES_S = 1500  # a busy machine
# Nothing is left to search but the way layers run, so that there are two trials.
FIXED = {
    "OPENPI_SKIP_IMAGES": "auto",
    "OPENPI_FLASH_ATTN": "0",
    "OPENPI_BATCH_CAMERAS": "1",
    "OPENPI_CAST_EARLY": "0",
}
OPTIONS = ["--model.max-token-len", "16", "--batch-size", "4", "--num-microbatches", "1", "--fsdp-devices", "1"]
OPTIONS += ["--remat.gemma", "full", "--remat.siglip", "full", "--steps", "1"]


def tune(out: pathlib.Path, *extra: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(out.parent)} | COMPILING | QUICK | FIXED | more
    command = [sys.executable, REPO / "scripts" / "tune.py", "pi05_demo", *OPTIONS, "--out", out, *extra]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=MINUTES_S)


@pytest.mark.long
def test_tuned_settings_are_found_once_and_trained_with(tmp_path: pathlib.Path, stand_in: pathlib.Path) -> None:
    out = tmp_path / "demo.json"
    done = tune(out, "--budget-min", "20")
    assert done.returncode == 0, done.stderr
    assert "fastest: " in done.stdout and "loader: not measured: no --data.path" in done.stdout
    found = json.loads(out.read_text())
    trials = found["found"]["trials"]
    assert {trial["point"]["unroll_layers"] for trial in trials} == {True, False} and len(trials) == 2
    assert all(trial["samples_per_s"] > 0 for trial in trials)
    assert found["found"]["samples_per_s"] == max(trial["samples_per_s"] for trial in trials)
    assert found["device"] == "cpu" and found["config"] == "pi05_demo"

    once_more = tune(out, "--budget-min", "20")  # all is known
    assert once_more.returncode == 0 and json.loads(out.read_text())["found"]["trials"] == trials

    env = {"OPENPI_PYTHON": str(stand_in), "JAX_PLATFORMS": "cpu"}
    started = Started(launch("run_opt.sh", "pi05_demo", "--tuned", str(out), "--seed", "7", **env))
    options = started.options
    assert options[-2:] == ["--seed", "7"] and "--tuned" not in options and str(out) not in options
    assert options[options.index("--batch-size") + 1] == "4" and options[options.index("--remat.gemma") + 1] == "full"
    for name, value in found["environment"].items():
        assert started.env[name] == value
    own = Started(launch("run_opt.sh", "pi05_demo", f"--tuned={out}", **env, OPENPI_BATCH_CAMERAS="0"))
    assert own.env["OPENPI_BATCH_CAMERAS"] == "0"  # the user's own value is kept

    assert_refused(launch("run_opt.sh", "pi05_libero", "--tuned", str(out), **env), "config is pi05_demo", "tune.py")
    out.write_text(json.dumps(found | {"device": "NVIDIA H200"}))
    refused = launch("run_opt.sh", "pi05_demo", "--tuned", str(out), **env)
    assert_refused(refused, "device is NVIDIA H200, here cpu", "Search again: python scripts/tune.py pi05_demo")
    assert_refused(launch("run_opt.sh", "pi05_demo", "--tuned", **env), "tuned/pi05_demo.json")


@pytest.mark.parametrize(("limit", "reason"), [("0.001", "does not fit, by prediction"), ("0.07", "The step needs")])
def test_what_does_not_fit_is_refused(tmp_path: pathlib.Path, limit: str, reason: str) -> None:
    limits = ("--memory-limit-gib", limit, "--budget-min", "20")
    done = tune(tmp_path / "demo.json", *limits, OPENPI_UNROLL_LAYERS="0")  # one trial
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "no setting ran" in done.stderr and reason in done.stderr
    assert not (tmp_path / "demo.json").exists()
