"""The profile: its programs compute the step's own numbers, its stages add up, its switches are those that are off."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from openpi_accel import tree
from openpi_accel.build.training import build_training
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import CameraKeys, RematConfig, TrainConfig, WeightLoaderConfig
from openpi_accel.errors import UserError
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.parallel.sharding import batch_sharding
from openpi_accel.tools.bench import random_batch
from openpi_accel.tools.profile import sizes
from openpi_accel.tools.profile.command import main
from openpi_accel.tools.profile.programs import DRAW, FORWARD, GRADIENT, STEP, UPDATE, Programs, time_in_turns
from openpi_accel.tools.profile.real_loop import LoopTimes, real_batches, time_loader, time_loop
from openpi_accel.tools.profile.report import Profile, as_json, print_profile
from openpi_accel.tools.profile.stages import BACKWARD, FETCH, FORWARD_LOSS, OPTIMIZER, TO_DEVICE, Stages, cut_stages
from openpi_accel.tools.profile.switches import Effect, missing_data_switches, missing_step_switches
from openpi_accel.train.memory import step_memory
from tests.conftest import COMPILING, REPO
from tests.tiny import tiny_config

CONFIG = tiny_config(action_horizon=4, weight_loader=WeightLoaderConfig(), batch_size=2, freeze="all_but_action_expert")
MEMORY = sizes.Memory(parameters=100, optimizer=200, average=100, batch=5, temporaries=None)
TRAFFIC = sizes.Traffic(host_to_device=1000, state_read=70, state_written=60, collectives={"all-reduce": 8.0})


def programs_of(config: TrainConfig) -> tuple[Any, Any, Programs, jax.sharding.Mesh]:
    mesh = make_mesh(1, jax.devices()[:1])
    training = build_training(config, Acceleration(), mesh)
    host = random_batch(config, ("left_wrist_0_rgb", "right_wrist_0_rgb"))
    batch = jax.device_put(host, batch_sharding(mesh))
    return training, host, Programs(training, training.fresh_state()[0], batch, config.num_microbatches, mesh), mesh


def test_the_programs_are_parts_of_the_step(quick: None) -> None:
    training, host, programs, mesh = programs_of(dataclasses.replace(CONFIG, num_microbatches=2))
    batch, start = jax.device_put(host, batch_sharding(mesh)), jax.tree.map(jnp.copy, programs.state)
    rng = jax.random.fold_in(training.train_rng, 0)
    loss = programs._forward(start.params, batch, rng)
    also_loss, grads = programs._gradient(start.params, batch, rng)
    by_parts, _ = programs._update(jax.tree.map(jnp.copy, start), grads, training.train_rng)
    metrics = programs.run_step()
    assert float(loss) == pytest.approx(float(metrics["loss"]), rel=1e-5)
    assert float(also_loss) == pytest.approx(float(metrics["loss"]), rel=1e-5)
    assert set(tree.flatten(grads)) == {p for p in tree.flatten(start.params) if training.is_trainable(p)}
    assert int(by_parts.step) == int(programs.state.step) == 1
    for path, leaf in tree.flatten(programs.state.params).items():
        np.testing.assert_allclose(tree.flatten(by_parts.params)[path], leaf, rtol=1e-4, atol=1e-6, err_msg=path)
    # The cheaper program does less, by the compiler's own count.
    flops = [getattr(programs, f"_{name}").cost_analysis()["flops"] for name in (UPDATE, FORWARD, GRADIENT)]
    assert flops[0] < flops[1] < flops[2]

    times = programs.time(2)
    assert set(times) == {DRAW, FORWARD, GRADIENT, UPDATE, STEP}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())

    memory = sizes.memory_by_kind(training, batch, programs.step)
    need = step_memory(programs.step)
    assert need is not None and memory.temporaries == need.temporaries
    # The compiler's arguments also have the step's number and the key, and lack inputs that feed nothing.
    known = memory.parameters + memory.optimizer + memory.average + memory.batch
    assert known == pytest.approx(need.state, rel=1e-3)
    moved = sizes.traffic(training, host, programs.step)
    assert moved.host_to_device == memory.batch and moved.collectives == {}
    frozen = sum(leaf.nbytes for path, leaf in tree.flatten(start.params).items() if not training.is_trainable(path))
    assert frozen > 0 and moved.state_read - moved.state_written == frozen


def test_bytes_of_sharded_arrays_are_one_devices() -> None:
    mesh = make_mesh(4)
    assert mesh.size == 8
    whole = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    split = jax.ShapeDtypeStruct((16, 4), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    assert sizes.device_bytes({"a": whole, "b": [split]}) == 256 + 32


def test_collectives_are_read_from_the_step() -> None:
    mesh = make_mesh(1)
    assert mesh.size == 8
    x = jax.device_put(jnp.ones((8, 16)), batch_sharding(mesh))
    total = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec())).lower(x).compile()
    assert sizes._sent(total) == {"all-reduce": pytest.approx(2 * 7 / 8 * 64)}


def test_programs_take_turns() -> None:
    calls: list[str] = []
    times = time_in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b") or time.sleep(0.02)}, 3)
    assert calls == ["a", "b"] * 5
    assert len(times["a"]) == 3 and min(times["b"]) >= 0.02


def test_the_loop_tells_what_the_devices_waited_for() -> None:
    def next_batch(finish_step: Any) -> tuple[int, float]:
        finish_step()
        time.sleep(0.05)
        return 1, 0.05

    loop = time_loop(lambda batch: jnp.float32(batch), next_batch, 4)
    assert loop.wait_s == pytest.approx(0.05) and loop.step_s >= 0.05


class FakeData:
    """A loader whose batches take a while, after some that are there at once."""

    def __init__(self, delay_s: float) -> None:
        self.config = dataclasses.replace(CONFIG, num_workers=1)
        self._delay_s = delay_s

    def loader(self) -> "FakeData":
        self._ready = self.config.data.prefetch_batches
        return self

    def __enter__(self) -> "FakeData":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> "FakeData":
        return self

    def __next__(self) -> Any:
        self._ready -= 1
        if self._ready < 0:
            time.sleep(self._delay_s)
        return type("Loaded", (), {"batch": {"x": np.ones((8, 2), np.float32)}, "sample_ids": np.arange(8)})()


def test_the_loader_alone_is_timed_once_its_stock_is_used_up() -> None:
    assert time_loader(FakeData(0.03), 3) >= 0.03  # type: ignore[arg-type]


def test_real_batches_come_through_the_prefetcher() -> None:
    mesh = make_mesh(1)
    with real_batches(FakeData(0.0), batch_sharding(mesh)) as next_batch:  # type: ignore[arg-type]
        batch, wait_s = next_batch(lambda: None)
    assert batch["x"].sharding == batch_sharding(mesh) and wait_s >= 0


def stages_of(loop: LoopTimes, fetch_s: float | None = 0.3, step_s: float = 1.0) -> Stages:
    programs = {DRAW: [0.1, 0.1, 9.0], FORWARD: [0.3], GRADIENT: [0.8], UPDATE: [0.25], STEP: [step_s]}
    return cut_stages(programs, fetch_s=fetch_s, transfer_s=0.1, loop=loop, drawn_bytes=4000, traffic=TRAFFIC)


def test_the_stages_are_differences_and_add_up() -> None:
    stages = stages_of(LoopTimes(step_s=1.4, wait_s=0.4))
    assert [stage.name for stage in stages.stages] == [FETCH, TO_DEVICE, FORWARD_LOSS, BACKWARD, OPTIMIZER]
    alone = [stage.alone_s for stage in stages.stages]
    assert alone == pytest.approx([0.3, 0.2, 0.2, 0.5, 0.2])
    # The wait is the loader's and the transfer's, three to one.
    assert [stage.exposed_s for stage in stages.stages] == pytest.approx([0.3, 0.2, 0.2, 0.5, 0.2])
    assert stages.sum_s == pytest.approx(1.4) and stages.adds_up and stages.bound_by.name == BACKWARD
    assert [stage.moved_bytes for stage in stages.stages] == [1000, 5000, None, 8.0, 130]

    hidden = stages_of(LoopTimes(step_s=1.0, wait_s=0.0))
    assert hidden.stages[0].exposed_s == 0 and hidden.stages[1].exposed_s == pytest.approx(0.1)
    assert hidden.adds_up
    assert stages_of(LoopTimes(step_s=1.04, wait_s=0.0)).adds_up
    assert not stages_of(LoopTimes(step_s=1.06, wait_s=0.0)).adds_up
    assert not stages_of(LoopTimes(step_s=0.94, wait_s=0.0)).adds_up
    starved = stages_of(LoopTimes(step_s=5.0, wait_s=4.0))
    assert starved.bound_by.name == FETCH and starved.adds_up

    resident = stages_of(LoopTimes(step_s=1.0, wait_s=0.0), fetch_s=None)
    assert [stage.alone_s for stage in resident.stages][:2] == pytest.approx([0.0, 0.1])
    assert resident.stages[0].moved_bytes is None and resident.adds_up


def shown(stages: Stages, *effects: Effect) -> str:
    console = Console(record=True, width=200, force_terminal=False, file=open(os.devnull, "w"))  # noqa: SIM115
    profile = Profile(
        settings={}, batch_size=10, stages=stages, memory=MEMORY, peak_memory_gib={"host_memory_peak_gib": 2.0},
        traffic=TRAFFIC, effects=effects,
    )  # fmt: skip
    print_profile(profile, console)
    values = json.loads(json.dumps(as_json(profile)))
    assert values["adds_up"] == stages.adds_up and values["bound_by"] == stages.bound_by.name
    return console.export_text()


def test_the_report_says_what_bounds_and_what_would_help() -> None:
    off = Effect(switch="OPENPI_X=1", what="does less", part="step")
    text = shown(stages_of(LoopTimes(step_s=1.4, wait_s=0.4)), off)
    assert "add up to the loop's step within 5 %" in text and "most of the step is backward" in text
    assert "OPENPI_X=1: not measured" in text and "--measure-switches" in text
    assert "throughput of the loop: 7.14 samples/s" in text and "all-reduce 8 bytes" in text
    measured = dataclasses.replace(off, before_s=1.0, after_s=0.8)
    text = shown(stages_of(LoopTimes(step_s=2.0, wait_s=0.4), step_s=0.7), measured)
    assert "NOT within 5 %" in text and "900.00 ms (45.0 %) more" in text
    assert "optimizer + average came out negative" in text
    assert "step 1000.00 -> 800.00 ms (1.25 times as fast)" in text and "--measure-switches" not in text
    loader = dataclasses.replace(measured, switch="OPENPI_L=1", part="loader")
    text = shown(stages_of(LoopTimes(step_s=5.0, wait_s=4.0)), measured, loader)
    assert text.index("OPENPI_L") < text.index("OPENPI_X") and "--num-workers" in text
    assert "every switch that applies" in shown(stages_of(LoopTimes(step_s=1.4, wait_s=0.4)))


def test_switches_that_are_off_and_apply() -> None:
    def names(config: TrainConfig, acceleration: Acceleration) -> set[str]:
        return {entry.name for entry in missing_step_switches(config, acceleration)}

    everything = {"camera_elision", "attention_auto", "one_vision_pass", "early_casts", "unrolled_layers", "remat_dots"}
    assert names(CONFIG, Acceleration()) == everything
    on = Acceleration(skip_images=("auto",), flash_attn=True, flash_impl="xla", cast_early=True)
    assert names(CONFIG, on) == {"one_vision_pass", "unrolled_layers", "remat_dots"}
    assert "remat_dots" not in names(dataclasses.replace(CONFIG, remat=RematConfig(gemma="none", siglip="dots")), on)
    assert "remat_dots" in names(dataclasses.replace(CONFIG, remat=RematConfig(gemma="dots")), on)
    cameras = CameraKeys(base_0_rgb="a", right_wrist_0_rgb="b")
    fed = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, cameras=cameras))
    assert "camera_elision" not in names(fed, Acceleration())

    assert [switch for switch, _ in missing_data_switches(Acceleration(worker_cpu=True))] == [
        "OPENPI_SKIP_VIDEO_DECODE=1"
    ]
    assert len(missing_data_switches(Acceleration())) == 2


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        main(["pi05_demo", "--steps", "0"], {})
    with pytest.raises(UserError, match="prompt length"):
        main(["pi05_demo", "--random"], {})


@pytest.mark.long
def test_the_script_on_the_demo(tmp_path: pathlib.Path) -> None:
    """Real data, a trace, and the effects of the two switches that are left off."""
    switches = {
        "OPENPI_SKIP_IMAGES": "auto",
        "OPENPI_FLASH_ATTN": "1",
        "OPENPI_BATCH_CAMERAS": "1",
        "OPENPI_UNROLL_LAYERS": "1",
        "OPENPI_WORKER_CPU": "1",
    }
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **COMPILING, **switches}
    options = ["--batch-size=4", "--num-workers=1", "--repeats=1", "--steps=2", "--measure-switches", "--json"]
    options += ["--remat.gemma=dots", "--remat.siglip=dots", "--trace=trace", "--model.vision-variant=tiny"]
    options += ["--model.paligemma-variant=tiny", "--model.action-expert-variant=tiny_expert"]
    done = subprocess.run(
        [sys.executable, REPO / "scripts" / "profile.py", "pi05_demo", *options],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    stages = {stage["name"]: stage for stage in values["stages"]["stages"]}
    assert list(stages) == [FETCH, TO_DEVICE, FORWARD_LOSS, BACKWARD, OPTIMIZER]
    assert stages[FETCH]["alone_s"] > 0 and stages[TO_DEVICE]["alone_s"] > 0
    assert values["sum_of_stages_s"] == pytest.approx(sum(stage["exposed_s"] for stage in stages.values()))
    pixels = 4 * 2 * 224 * 224 * 3  # uint8; two cameras
    assert pixels < values["traffic"]["host_to_device"] < 1.01 * pixels
    assert values["settings"]["cameras"] == ["base_0_rgb", "left_wrist_0_rgb"]
    effects = {effect["switch"]: effect for effect in values["effects"]}
    assert set(effects) == {"OPENPI_CAST_EARLY=1", "OPENPI_SKIP_VIDEO_DECODE=1"}
    assert all(effect["before_s"] > 0 and effect["after_s"] > 0 for effect in effects.values())
    assert list((tmp_path / "trace").rglob("*.trace.json.gz")) and (tmp_path / "trace" / "step.hlo.txt.gz").is_file()


def test_the_scripts_folder_does_not_hide_the_standard_librarys_profile() -> None:
    program = "import sys; sys.path.insert(0, 'scripts'); import _entry, cProfile, profile; print(profile.__file__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert str(REPO) not in done.stdout
