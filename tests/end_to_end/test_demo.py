"""The demo through its script: a few steps, then resumed. Proof of learning is `--with-control` at full length."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.conftest import COMPILING, QUICK, REPO


def demo(folder: pathlib.Path, *options: str, script: str = "demo.py") -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), **COMPILING, **QUICK}
    return subprocess.run(
        [sys.executable, str(REPO / "scripts" / script), *options], env=env, capture_output=True, text=True, cwd=folder
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """The demo with 6 steps, then resumed to 9."""
    folder = tmp_path_factory.mktemp("demo")
    options = ["pi05_demo", "--exp-name=short", "--batch-size=4", "--log-interval=1", "--num-workers=1"]
    first = demo(folder, *options, "--num-train-steps=6", "--overwrite")
    second = demo(folder, "pi05_demo", "--exp-name=short", "--num-train-steps=9", "--resume")  # the rest is known
    return folder, first, second


def test_it_runs_and_says_where_everything_is(runs):
    folder, first, _ = runs
    run = folder / "checkpoints" / "pi05_demo" / "short"
    # Six steps teach nothing: the demo must say so rather than pass.
    assert first.returncode == 1, first.stdout + first.stderr
    assert "FAILED: the sampled actions are no better than the mean action" in first.stdout
    assert "Traceback" not in first.stdout + first.stderr
    for name in ("loss_curve.png", "first_batch.png", "metrics.jsonl", "open_loop/errors.json"):
        assert (run / name).stat().st_size > 0
        assert name in first.stdout.replace("\n", "")
    assert list((run / "open_loop").glob("episode_*.png"))
    assert "statistics: wrote" in first.stdout


def test_the_run_ends_with_how_fast_it_was(runs):
    _, first, second = runs
    for done, steps in ((first, 6), (second, 3)):
        summary = next(line for line in done.stdout.splitlines() if line.startswith(f"{steps} steps: median "))
        assert "samples/s" in summary and "waiting for data" in summary and "GiB of this process" in summary


def test_resuming_continues_the_run(runs):
    folder, _, second = runs
    run = folder / "checkpoints" / "pi05_demo" / "short"
    assert second.returncode == 1, second.stdout + second.stderr
    assert "is there already" in second.stdout and "resumed" in second.stdout
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(9))  # --log-interval=1 is the first start's
    config = json.loads((run / "config.json").read_text())
    assert (config["batch_size"], config["num_train_steps"], config["resume"]) == (4, 9, False)
    assert "with the options in its config.json\n  but for: --num-train-steps 9 (was 6)\n" in second.stdout
    assert "norm_stats.json is there already" in second.stdout and "statistics: wrote" not in second.stdout
    assert "over mean action's: the error divided by" in second.stdout
    assert f"saved {run / '8'} (step 8)" in second.stdout
    assert (run / "8" / "params").is_dir() and (
        run / "8" / "assets" / "openpi_accel" / "demo" / "norm_stats.json"
    ).is_file()


def test_it_says_where_it_ran(runs):
    folder, _, _ = runs
    told = json.loads((folder / "checkpoints" / "pi05_demo" / "short" / "environment.json").read_text())
    assert told["acceleration"]["flash_attn"] is False and told["jax"] and told["num_devices"] == 1


def test_held_out_episodes_were_not_trained_on(runs):
    folder, _, _ = runs
    run = folder / "checkpoints" / "pi05_demo" / "short"
    trained = json.loads((run / "config.json").read_text())["data"]["episodes"]
    errors = json.loads((run / "open_loop" / "errors.json").read_text())
    assert errors["held_out"] is True and not set(errors["episodes"]) & set(trained)


def test_the_evaluation_script_gives_the_same_numbers(runs):
    folder, _, _ = runs
    run = folder / "checkpoints" / "pi05_demo" / "short"
    saved = json.loads((run / "open_loop" / "errors.json").read_text())
    out = folder / "evaluation"
    options = ["--json", "--num-samples", "96", "--out", str(out)]
    done = demo(folder, str(run), *options, script="eval_open_loop.py")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["mean_absolute_error"] == saved["mean_absolute_error"]
    assert values["checkpoint"].endswith("/8")
    assert len(list(out.glob("episode_*.png"))) == 3
