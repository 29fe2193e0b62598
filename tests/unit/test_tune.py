"""The tuner: its search and its files with a stand-in for the benchmark, the loader's rates, who may read the file."""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from openpi_accel.config.flags import Acceleration
from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import TrainConfig
from openpi_accel.errors import UserError
from openpi_accel.tools.tune import loader, tuned_file
from openpi_accel.tools.tune.command import main
from openpi_accel.tools.tune.loader import LoaderRate
from openpi_accel.tools.tune.search import Search, fastest
from openpi_accel.tools.tune.space import Point, all_on, fixed_fields, neighbours, start_point
from openpi_accel.tools.tune.trials import Bench, Trial
from tests.data_fakes import write_tokenizer
from tests.lerobot_writer import CAMERA, write_dataset

DEMO = dataclasses.replace(
    get_preset("pi05_demo"), model=dataclasses.replace(get_preset("pi05_demo").model, max_token_len=16)
)
# Faster by each switch, by larger batches up to 56, and slower by recomputation; cast_early alone does harm; above 60
# there is no memory. Notes that it ran.
BENCH = """
import json, os, sys
on = lambda name: os.environ.get("OPENPI_" + name) == "1"
value = lambda name: sys.argv[sys.argv.index(name) + 1]
open(sys.argv[1], "a").write(" ".join(sys.argv[2:]) + "\\n")
batch = int(value("--batch-size"))
if batch > 60:
    print("noise", file=sys.stderr)
    print("error: The step needs 200.0 GiB on each device.", file=sys.stderr)
    sys.exit(2)
if value("--remat.siglip") == "none":
    sys.exit("a kernel failed")
speed = 10.0 + batch / 10 + 8 * on("FLASH_ATTN") + 4 * on("UNROLL_LAYERS") - 3 * on("CAST_EARLY")
speed -= 5 * (value("--remat.gemma") == "full") + int(value("--num-microbatches"))
print("progress")
result = {"samples_per_s": speed, "step_s": batch / speed, "peak_memory_gib": None, "temporaries_gib": 1.0}
print(json.dumps(result))
"""


@dataclasses.dataclass
class Tuning:
    """A search with the stand-in."""

    folder: pathlib.Path
    config: TrainConfig = DEMO
    fixed: frozenset[str] = frozenset()
    limit: int | None = None
    budget_s: float = 600
    key: str = "here"
    stop: Callable[[Trial], None] = lambda trial: None

    def search(self) -> list[Trial]:
        bench = Bench(
            command=[sys.executable, "-c", BENCH, str(self.folder / "ran")],
            environment={"OPENPI_CAST_EARLY": "1"},  # a setting decides about all switches
            num_devices=1,
            key={"device": self.key},
            file=self.folder / "trials.jsonl",
        )
        search = Search(
            config=self.config,
            bench=bench,
            fixed=self.fixed,
            limit=self.limit,
            budget_s=self.budget_s,
            say=self.stop,
        )
        return search.run(start_point(self.config, Acceleration(), 1))

    @property
    def num_run(self) -> int:
        ran = self.folder / "ran"
        return len(ran.read_text().splitlines()) if ran.exists() else 0


def test_it_starts_at_upstreams_settings_and_finds_the_best(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(DEMO, batch_size=64)
    trials = Tuning(tmp_path, config).search()
    first, corner = trials[0].point, trials[1].point
    assert first == dataclasses.replace(start_point(config, Acceleration(), 1), batch_per_device=32)
    assert first.attention == "reference" and first.remat_gemma == "full" and not first.unroll_layers
    assert corner == all_on(start_point(config, Acceleration(), 1), frozenset()) and corner.batch_per_device == 64
    assert "needs 200.0 GiB" in (trials[1].reason or "")
    assert trials[2].point == dataclasses.replace(corner, batch_per_device=56)  # not enough memory: a smaller batch
    best = fastest(trials)
    assert best is not None and best.point.unroll_layers and best.point.attention != "reference"
    assert not best.point.cast_early and best.point.remat_gemma == "dots" and best.point.batch_per_device == 56
    assert len({trial.point for trial in trials}) == len(trials)
    failed = [trial for trial in trials if trial.point.remat_siglip == "none"]
    assert failed and all("exit code 1: a kernel failed" in (trial.reason or "") for trial in failed)


def test_a_killed_search_goes_on(tmp_path: pathlib.Path) -> None:
    done: list[Trial] = []

    def killed(trial: Trial) -> None:
        done.append(trial)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tuning(tmp_path, stop=killed).search()
    interrupted = Tuning(tmp_path)
    assert interrupted.num_run == 3
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"key": {"dev')  # what a kill in the middle of a line leaves
    trials = interrupted.search()
    assert trials[:3] == done and interrupted.num_run == len(trials)
    again = Tuning(tmp_path).search()
    assert again == trials and interrupted.num_run == len(trials)
    other = Tuning(tmp_path, key="elsewhere")
    assert len(other.search()) == len(trials) and other.num_run == 2 * len(trials)


def test_what_the_user_decided_is_not_searched(tmp_path: pathlib.Path) -> None:
    argv = ["pi05_demo", "--batch-size=24", "--remat.gemma", "full"]
    fixed = fixed_fields(argv, {"OPENPI_FLASH_IMPL": "xla", "HOME": "/"})
    assert fixed == {"batch_per_device", "remat_gemma", "attention"}
    config = dataclasses.replace(DEMO, batch_size=24)
    trials = Tuning(tmp_path, config, fixed=fixed).search()
    assert {trial.point.batch_per_device for trial in trials} == {24}
    assert {trial.point.remat_gemma for trial in trials} == {"full"}
    assert {trial.point.attention for trial in trials} == {"reference"}
    assert {trial.point.unroll_layers for trial in trials} == {True, False}


def test_no_trial_starts_that_the_time_would_not_last_for(tmp_path: pathlib.Path) -> None:
    assert Tuning(tmp_path, budget_s=0.0).search() == []
    tuning = Tuning(tmp_path)
    everything = tuning.search()
    file = tmp_path / "trials.jsonl"
    slow = {"key": {"device": "here"}, "trial": dataclasses.asdict(everything[0]) | {"wall_s": 1e6}}
    file.write_text(json.dumps(slow) + "\n")
    assert len(tuning.search()) == 1 < len(everything)  # the next would take as long


def test_a_trial_that_takes_too_long_is_ended(tmp_path: pathlib.Path) -> None:
    bench = Bench(
        command=[sys.executable, "-c", "import time; time.sleep(600)"],
        environment={},
        num_devices=1,
        key={},
        file=tmp_path / "trials.jsonl",
    )
    trial = bench.run(start_point(DEMO, Acceleration(), 1), None, 0.5)
    assert trial.reason == "the time was over before it was measured" and trial.wall_s < 300
    assert not bench.file.exists()  # it says nothing about the setting


def test_what_cannot_fit_is_not_run(tmp_path: pathlib.Path) -> None:
    fixed = frozenset({"attention", "batch_cameras", "cast_early", "remat_gemma", "remat_siglip"})
    tuning = Tuning(tmp_path, limit=2**20, fixed=fixed)  # the state alone is larger
    trials = tuning.search()
    assert trials and tuning.num_run == 0
    assert {trial.reason for trial in trials} == {"does not fit, by prediction"}
    assert all((trial.predicted_gib or 0) > 2**-10 for trial in trials)


def test_the_batch_is_as_large_as_is_predicted_to_fit(tmp_path: pathlib.Path) -> None:
    tuning = Tuning(tmp_path, limit=int(0.2 * 2**30), budget_s=600)
    tuning.stop = lambda trial: (_ for _ in ()).throw(KeyboardInterrupt) if trial.point.unroll_layers else None
    with pytest.raises(KeyboardInterrupt):
        tuning.search()
    rows = [json.loads(line)["trial"] for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    corner = rows[-1]
    assert 16 < corner["point"]["batch_per_device"] < 256 and corner["point"]["batch_per_device"] % 8 == 0
    assert corner["predicted_gib"] <= 0.2


def test_neighbours_differ_in_one_thing() -> None:
    point = start_point(DEMO, Acceleration(), 1)
    near = list(neighbours(point, frozenset(), 4))
    for other in near:
        changed = [f.name for f in dataclasses.fields(Point) if getattr(point, f.name) != getattr(other, f.name)]
        assert len(changed) == 1
    assert {other.fsdp_devices for other in near} == {1, 4}
    assert point.acceleration() == Acceleration() and all_on(point, frozenset()).acceleration().flash_attn


def test_the_cheapest_loader_that_is_enough_is_taken() -> None:
    rates = [LoaderRate(num_workers=n, prefetch_batches=4, samples_per_s=s) for n, s in ((1, 30), (2, 58), (4, 60))]
    assert loader.choose(rates, 25).num_workers == 1
    assert loader.choose(rates, 50).num_workers == 2
    assert loader.choose(rates, 100).num_workers == 2  # 60 is not worth two workers more
    assert loader.choose(rates).samples_per_s == 58


def test_the_loader_is_measured(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_MEASURED_S", 0.1)
    root = write_dataset(tmp_path / "dataset", version="v3.0", kind="image", lengths=(9, 7))
    preset = get_preset("pi05_lerobot")
    data = dataclasses.replace(
        preset.data,
        path=str(root),
        tokenizer_path=str(write_tokenizer(tmp_path)),
        cameras=dataclasses.replace(preset.data.cameras, base_0_rgb=CAMERA),
    )
    model = dataclasses.replace(preset.model, discrete_state_input=False)
    config = dataclasses.replace(preset, data=data, model=model, batch_size=4)
    data = loader.open_data(config, {})
    assert data.config.model.max_token_len == 12  # auto
    rates = loader.measure(data, 4, 2, 600)
    assert [(rate.num_workers, rate.prefetch_batches) for rate in rates[:2]] == [(1, 4), (2, 4)]
    assert len(rates) == 3 and rates[2].prefetch_batches == 8 and all(rate.samples_per_s > 0 for rate in rates)

    short = dataclasses.replace(config, model=dataclasses.replace(model, max_token_len=4))
    with pytest.raises(UserError, match="--model.max-token-len"):  # before anything is tried
        loader.open_data(short, {})


SMI = "0, GPU-a, NVIDIA H200, 580.1, 0, 143771, 0\n1, GPU-b, NVIDIA H200, 580.1, 0, 143771, 0\n"


def test_the_devices_are_looked_at_without_taking_them() -> None:
    def missing(command: object) -> str:
        raise FileNotFoundError

    def sick(command: object) -> str:
        raise subprocess.TimeoutExpired("nvidia-smi", 30)

    found = tuned_file.look(lambda command: SMI, {})
    assert (found.device, found.num_devices, round(found.memory_gib or 0)) == ("NVIDIA H200", 2, 140)
    assert tuned_file.look(lambda command: SMI, {"CUDA_VISIBLE_DEVICES": "1"}).num_devices == 1
    cpu = tuned_file.Hardware(device="cpu", num_devices=1, memory_gib=None)
    assert tuned_file.look(lambda command: SMI, {"JAX_PLATFORMS": "cpu"}) == cpu
    assert tuned_file.look(missing, {}) == tuned_file.look(sick, {}) == cpu
    with pytest.raises(UserError, match="several kinds"):
        tuned_file.look(lambda command: SMI.replace("b, NVIDIA H200", "b, NVIDIA L40S"), {})


def test_a_file_is_for_one_config_one_kind_of_device_and_one_code(tmp_path: pathlib.Path) -> None:
    here = tuned_file.Hardware(device="NVIDIA H200", num_devices=2, memory_gib=140.0)
    path = tmp_path / "tuned" / "pi05_libero.json"
    with pytest.raises(UserError, match=r"does not exist. Search again: python scripts/tune.py pi05_libero"):
        tuned_file.read(path, "pi05_libero", here, "code")
    tuned = tuned_file.Tuned(
        config="pi05_libero",
        device="NVIDIA H200",
        num_devices=2,
        code="code",
        environment={"OPENPI_FLASH_ATTN": "1"},
        arguments=("--batch-size", "112"),
        found={},
    )
    tuned_file.write(path, tuned)
    assert tuned_file.read(path, "pi05_libero", here, "code") == tuned
    assert [child.name for child in path.parent.iterdir()] == [path.name]
    for config, hardware, code, message in (
        ("pi0_libero", here, "code", "config is pi05_libero, here pi0_libero"),
        (
            "pi05_libero",
            dataclasses.replace(here, device="NVIDIA L40S"),
            "code",
            "device is NVIDIA H200, here NVIDIA L40S",
        ),
        ("pi05_libero", dataclasses.replace(here, num_devices=8), "code", "number of devices is 2, here 8"),
        ("pi05_libero", here, "newer", "code is code, here newer"),
    ):
        with pytest.raises(UserError, match=message):
            tuned_file.read(path, config, hardware, code)
    path.write_text('{"version": 1}')
    with pytest.raises(UserError, match="is not what scripts/tune.py writes"):
        tuned_file.read(path, "pi05_libero", here, "code")


@pytest.mark.parametrize("extra", [["--budget-min", "0"], ["--steps", "0"], ["--memory-limit-gib", "-1"]])
def test_mistakes_are_told(extra: list[str], tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="--budget-min and --memory-limit-gib must be above 0"):
        main(["pi05_demo", *extra], {}, tmp_path)
