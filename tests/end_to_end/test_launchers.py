"""The launchers' contract with users' scripts: arguments, variables, messages. The Python they start is a stand-in."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import threading

import pytest

from openpi_accel.errors import UserError
from openpi_accel.parallel.platforms import parse
from openpi_accel.parallel.roll_call import roll_call
from openpi_accel.parallel.same_program import code_hash
from openpi_accel.tools.tune import tuned_file
from tests.conftest import REPO
from tests.lerobot_writer import write_dataset

BASH = shutil.which("bash")
XLA_FLAGS = (
    "--xla_gpu_triton_gemm_any=false --xla_gpu_enable_latency_hiding_scheduler=true "
    "--xla_gpu_enable_pipelined_all_gather=true --xla_gpu_dot_merger_threshold_mb=0"
)
COMPUTE = {
    "OPENPI_FLASH_ATTN": "1",
    "OPENPI_FLASH_IMPL": "auto",
    "OPENPI_BATCH_CAMERAS": "1",
    "OPENPI_CAST_EARLY": "1",
    "OPENPI_UNROLL_LAYERS": "1",
}
NODE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}

# Answers what the launchers ask of a Python; in place of training, prints what it was given.
STAND_IN = f"""#!{BASH}
case "$1" in
    -c) exec {sys.executable} "$@" ;;
    --version) exec {sys.executable} "$@" ;;
    */missing_packages.py) [[ ! -e "$(dirname "$0")/broken" ]]; exit ;;
    */check_nodes.py | */tuned_settings.py) exec {sys.executable} "$@" ;;
esac
exec {sys.executable} -c 'import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))' "$@"
"""


def write_program(path: pathlib.Path, text: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def stand_in(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_program(tmp_path / "python" / "python", STAND_IN)


def launch(launcher: str, *arguments: str, root: pathlib.Path = REPO, cwd: pathlib.Path | None = None, **env: str):
    """Runs a launcher with an environment of `env` and little else."""
    return subprocess.run(
        [BASH, root / launcher, *arguments],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYENV_ROOT": os.environ.get("PYENV_ROOT", "")} | env,
        cwd=cwd or root,
        capture_output=True,
        text=True,
        timeout=300,  # a busy machine
    )


class Started:
    """What the stand-in was started with."""

    def __init__(self, done: subprocess.CompletedProcess):
        assert done.returncode == 0, done.stderr
        argv, self.env = json.loads(done.stdout)
        self.script = pathlib.Path(argv[0]).relative_to(REPO).as_posix()
        self.config, self.options = argv[1], argv[2:]


def assert_refused(done: subprocess.CompletedProcess, *words: str) -> None:
    """Exit code 2, nothing started, exactly one message, and it holds `words`."""
    messages = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and done.stdout == "" and len(messages) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in messages[0]


def test_baseline_turns_nothing_on(stand_in):
    started = Started(launch("run_baseline.sh", OPENPI_PYTHON=str(stand_in)))
    assert (started.script, started.config) == ("scripts/train.py", "pi05_libero")
    assert started.options == ["--exp-name=pi05_libero_baseline", "--overwrite"]
    assert [name for name in started.env if name.startswith(("OPENPI_", "XLA_", "JAX_"))] == ["OPENPI_PYTHON"]
    assert started.env["PYTHONPATH"] == str(REPO)


def test_baseline_says_when_a_switch_is_set(stand_in):
    done = launch("run_baseline.sh", OPENPI_PYTHON=str(stand_in), OPENPI_SKIP_IMAGES="right_wrist_0_rgb")
    assert "not the plain baseline" in done.stderr and Started(done).env["OPENPI_SKIP_IMAGES"] == "right_wrist_0_rgb"


def test_baseline_reads_as_upstream_does_where_lerobot_is(stand_in, tmp_path):
    (tmp_path / "packages" / "lerobot").mkdir(parents=True)
    (tmp_path / "packages" / "lerobot" / "__init__.py").touch()
    env = {"OPENPI_PYTHON": str(stand_in), "PYTHONPATH": str(tmp_path / "packages")}
    done = launch("run_baseline.sh", "pi05_lerobot", "--seed", "3", **env)
    assert "lerobot's own reader, two workers" in done.stderr
    assert Started(done).options[-6:] == ["--data.reader", "lerobot", "--num-workers", "2", "--seed", "3"]
    chosen = launch("run_baseline.sh", "--data.reader=native", "--num-workers=1", **env)
    assert Started(chosen).options[-2:] == ["--data.reader=native", "--num-workers=1"]
    assert (
        "upstream's own is used where lerobot is installed"
        in launch("run_baseline.sh", **env | {"PYTHONPATH": ""}).stderr
    )


@pytest.mark.parametrize("config", ["pi05_libero", "pi0_libero"])
def test_opt_on_libero(stand_in, config):
    started = Started(launch("run_opt.sh", config, OPENPI_PYTHON=str(stand_in)))
    assert started.options == [
        f"--exp-name={config}_opt", "--num-workers", "8", "--model.max-token-len", "28", "--overwrite",
    ]  # fmt: skip
    assert started.env["OPENPI_SKIP_IMAGES"] == "right_wrist_0_rgb" and started.env["OPENPI_SKIP_VIDEO_DECODE"] == "1"
    assert "XLA_FLAGS" not in started.env and "JAX_OPTIMIZATION_LEVEL" not in started.env  # no GPU answers here
    assert started.env["OPENPI_WORKER_CPU"] == "1"
    assert not {*COMPUTE, "JAX_COMPILATION_CACHE_DIR", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & set(started.env)


def test_opt_on_other_data_looks_at_the_data(stand_in):
    started = Started(launch("run_opt.sh", "pi05_lerobot", OPENPI_PYTHON=str(stand_in)))
    assert started.env["OPENPI_SKIP_IMAGES"] == "auto"
    assert started.options[1:5] == ["--num-workers", "8", "--model.max-token-len", "auto"]


def test_the_demo_runs_the_demo_script(stand_in):
    started = Started(launch("run_opt.sh", "pi05_demo", OPENPI_PYTHON=str(stand_in)))
    assert (started.script, started.config) == ("scripts/demo.py", "pi05_demo")


def test_variables_become_options(stand_in):
    done = launch(
        "run_opt.sh",
        OPENPI_PYTHON=str(stand_in),
        EXP_NAME="mine",
        RESUME="1",
        SAVE_INTERVAL="250",
        DATA_PATH="/data/with space",
        BASE_CHECKPOINT_PATH="/base/params",
    )
    options = Started(done).options
    assert options[0] == "--exp-name=mine" and "--resume" in options and "--overwrite" not in options
    assert options[-3:] == [
        "--save-interval=250", "--data.path=/data/with space", "--weight-loader.params-path=/base/params",
    ]  # fmt: skip


def test_a_resumed_run_keeps_its_own_options(stand_in, tmp_path):
    base = ["--checkpoint-base-dir", str(tmp_path)]
    fresh = Started(launch("run_opt.sh", *base, OPENPI_PYTHON=str(stand_in), EXP_NAME="a", RESUME="1"))
    assert "--model.max-token-len" in fresh.options  # a run without config.json says nothing about itself
    saved = tmp_path / "pi05_libero" / "a" / "config.json"
    saved.parent.mkdir(parents=True)
    saved.write_text("{}")
    for extra, env in (([], {"RESUME": "1"}), (["--resume"], {})):
        done = launch("run_opt.sh", *base, *extra, OPENPI_PYTHON=str(stand_in), EXP_NAME="a", **env)
        options = Started(done).options
        assert options[0] == "--exp-name=a" and "--resume" in options and "--overwrite" not in options
        assert not {"--num-workers", "--model.max-token-len"} & set(options)
        assert f"resuming with the options in {saved}" in done.stderr
    elsewhere = launch("run_opt.sh", *base, OPENPI_PYTHON=str(stand_in), EXP_NAME="a", RESUME="1", cwd=tmp_path)
    assert not any(option.startswith("--assets-base-dir") for option in Started(elsewhere).options)
    anew = Started(launch("run_opt.sh", *base, OPENPI_PYTHON=str(stand_in), EXP_NAME="a"))
    assert "--model.max-token-len" in anew.options and "--overwrite" in anew.options


def test_the_users_own_choice_wins(stand_in):
    own = ["--num-workers=3", "--exp-name", "b", "--model.max-token-len", "48", "--resume"]
    done = launch("run_opt.sh", *own, OPENPI_PYTHON=str(stand_in), OPENPI_SKIP_IMAGES="", OPENPI_SKIP_VIDEO_DECODE="0")
    started = Started(done)
    assert started.config == "pi05_libero" and started.options[-len(own) :] == own  # tyro takes the last
    assert "--overwrite" not in started.options
    assert started.env["OPENPI_SKIP_IMAGES"] == "" and started.env["OPENPI_SKIP_VIDEO_DECODE"] == "0"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RESUME": "maybe"}, ["RESUME=maybe", "RESUME=1"]),
        ({"SAVE_INTERVAL": "often"}, ["SAVE_INTERVAL=often", "SAVE_INTERVAL=1000"]),
        ({"SAVE_INTERVAL": "0"}, ["SAVE_INTERVAL=0"]),
        ({"OPENPI_STRICT_EQUIV": "yes"}, ["OPENPI_STRICT_EQUIV=yes"]),
        ({"OPENPI_PYTHON": "no-such-python"}, ["OPENPI_PYTHON=no-such-python", "unset"]),
        ({"OPENPI_PYTHON": "/bin/true"}, ["OPENPI_PYTHON=/bin/true", "3.12"]),
    ],
)
def test_wrong_values_are_refused(stand_in, env, words):
    assert_refused(launch("run_opt.sh", **{"OPENPI_PYTHON": str(stand_in)} | env), *words)


def test_resume_and_overwrite_exclude_each_other(stand_in):
    assert_refused(launch("run_opt.sh", "--overwrite", OPENPI_PYTHON=str(stand_in), RESUME="1"), "--overwrite")


def test_a_python_without_the_packages_is_refused(tmp_path):
    # -S leaves site-packages out: a real Python that has nothing.
    bare = write_program(tmp_path / "bare", f'#!{BASH}\nexec {sys.executable} -I -S "$@"\n')
    done = launch("run_opt.sh", OPENPI_PYTHON=str(bare))
    assert_refused(done, "jax>=", "flax>=", "augmax==", "Pillow>=", "requirements/cpu.txt")


def test_this_python_has_the_packages():
    done = subprocess.run(
        [sys.executable, REPO / "scripts" / "missing_packages.py", "--extra", "dev"], capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"")


def test_an_active_venv_that_has_the_packages_is_used(stand_in):
    (stand_in.parent / "bin").mkdir()
    shutil.copy(stand_in, stand_in.parent / "bin" / "python")
    done = launch("run_opt.sh", VIRTUAL_ENV=str(stand_in.parent))
    assert Started(done) and str(stand_in.parent / "bin" / "python") in done.stderr


@pytest.mark.parametrize(("driver", "cuda"), [("580.65.06", "cuda13"), ("550.54.15", "cuda12")])
def test_a_gpu_gets_the_flags_and_its_set(stand_in, tmp_path, driver, cuda):
    write_program(tmp_path / "gpu" / "nvidia-smi", f"#!{BASH}\necho {driver}\necho {driver}\n")
    path = f"{tmp_path / 'gpu'}:{os.environ['PATH']}"
    done = launch("run_opt.sh", OPENPI_PYTHON=str(stand_in), PATH=path, XLA_FLAGS="--xla_own=1")
    started = Started(done)
    assert started.env["XLA_FLAGS"] == f"{XLA_FLAGS} --xla_own=1" and started.env["JAX_OPTIMIZATION_LEVEL"] == "O1"
    assert {name: started.env[name] for name in COMPUTE} == COMPUTE
    assert started.options[-5:-1] == ["--remat.gemma", "dots", "--remat.siglip", "dots"]
    assert started.env["JAX_COMPILATION_CACHE_DIR"] == str(REPO / ".cache" / "jax")
    assert started.env["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.95"
    chosen = {"OPENPI_FLASH_IMPL": "xla", "OPENPI_CAST_EARLY": "0", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    own = Started(launch("run_opt.sh", OPENPI_PYTHON=str(stand_in), PATH=path, **chosen))
    assert {name: own.env[name] for name in chosen} == chosen

    strict = Started(launch("run_opt.sh", OPENPI_PYTHON=str(stand_in), PATH=path, OPENPI_STRICT_EQUIV="1"))
    assert "XLA_FLAGS" not in strict.env and "JAX_OPTIMIZATION_LEVEL" not in strict.env
    assert strict.options == started.options

    baseline = Started(launch("run_baseline.sh", OPENPI_PYTHON=str(stand_in), PATH=path))
    assert "XLA_FLAGS" not in baseline.env and "JAX_OPTIMIZATION_LEVEL" not in baseline.env

    (stand_in.parent / "broken").touch()
    assert_refused(launch("run_opt.sh", OPENPI_PYTHON=str(stand_in), PATH=path), f"requirements/{cuda}.txt")


def test_the_readme_lists_what_opt_prints_in_its_order(stand_in, tmp_path):
    write_program(tmp_path / "gpu" / "nvidia-smi", f"#!{BASH}\necho 580.65.06\n")
    path = f"{tmp_path / 'gpu'}:{os.environ['PATH']}"
    done = launch("run_opt.sh", OPENPI_PYTHON=str(stand_in), PATH=path)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("accelerations: ")]
    line = re.sub(r"XLA_FLAGS='[^']*'", "XLA_FLAGS=", line)
    printed = re.findall(r"[A-Z_]+(?==)|--[a-z.-]+", line)
    text = (REPO / "README.md").read_text().split("## Switches")[1].split("| otherwise")[0]
    rows = [row.split(" | ")[0] for row in text.splitlines() if row.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([A-Z_]+|--[a-z.-]+)", row)]
    assert listed == printed and len(printed) == 16


def test_multinode_has_opts_settings(stand_in):
    nccl = {"NCCL_SOCKET_IFNAME": "eth1", "NCCL_IB_DISABLE": "1", "NPROC_PER_NODE": "8"}
    started = Started(launch("run_multinode.sh", OPENPI_PYTHON=str(stand_in), **NODE, **nccl))
    single = Started(launch("run_opt.sh", OPENPI_PYTHON=str(stand_in)))
    assert started.options == single.options
    assert {name: started.env[name] for name in NODE | nccl} == NODE | nccl


@pytest.fixture
def tuned(tmp_path: pathlib.Path) -> pathlib.Path:
    """As scripts/tune.py leaves it on a machine without GPUs."""
    path = tmp_path / "tuned.json"
    found = tuned_file.Tuned(
        config="pi05_libero",
        device="cpu",
        num_devices=1,
        code=code_hash(REPO / "openpi_accel"),
        environment={"OPENPI_BATCH_CAMERAS": "1"},
        arguments=("--batch-size", "24", "--remat.gemma", "full"),
        found={},
    )
    tuned_file.write(path, found)
    return path


def test_multinode_takes_tuned_settings_as_opt_does(stand_in, tuned):
    env = {"OPENPI_PYTHON": str(stand_in), "JAX_PLATFORMS": "cpu"}
    options = ["pi05_libero", "--tuned", str(tuned), "--seed", "7"]
    done = launch("run_multinode.sh", *options, **env, **NODE)
    started, single = Started(done), Started(launch("run_opt.sh", *options, **env))
    assert started.options == single.options and started.options[-2:] == ["--seed", "7"]
    assert started.options[started.options.index("--batch-size") + 1] == "24"
    assert started.env["OPENPI_BATCH_CAMERAS"] == "1"
    assert "the batch that was found for one node" in done.stderr and "Give --batch-size" in done.stderr
    own = launch("run_multinode.sh", "pi05_libero", f"--tuned={tuned}", "--batch-size=48", **env, **NODE)
    assert Started(own).options[-1] == "--batch-size=48" and "found for one node" not in own.stderr


def test_multinode_tells_the_others_of_a_tuned_file_that_is_refused(stand_in, tuned):
    here = NODE | {"OPENPI_PYTHON": str(stand_in), "JAX_PLATFORMS": "cpu", "MASTER_ADDR": "127.0.0.1"}
    with node_0_of(here) as heard:
        done = launch("run_multinode.sh", "pi0_libero", "--tuned", str(tuned), **here)
    assert_refused(done, "config is pi05_libero, here pi0_libero", "Search again: python scripts/tune.py pi0_libero")
    (message,) = heard
    assert "Rank 1 (" in message and "its file for --tuned is refused" in message


@pytest.mark.parametrize("name", NODE)
def test_multinode_names_what_is_missing(stand_in, name):
    env = {key: value for key, value in NODE.items() if key != name}
    assert_refused(launch("run_multinode.sh", OPENPI_PYTHON=str(stand_in), **env), f"{name} is not set", f"{name}=")


@pytest.mark.parametrize(
    ("name", "value"),
    [("MASTER_ADDR", "http://a"), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536"), ("MASTER_PORT", "abc"), ("RANK", "2"),
     ("RANK", "-1"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "two"), ("NPROC_PER_NODE", "all")],
)  # fmt: skip
def test_multinode_refuses_wrong_values(stand_in, name, value):
    done = launch("run_multinode.sh", OPENPI_PYTHON=str(stand_in), **NODE | {name: value})
    assert_refused(done, f"{name}={value}", "for example")


def test_multinode_takes_slurms_word(stand_in):
    step = {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
    started = Started(launch("run_multinode.sh", OPENPI_PYTHON=str(stand_in), SLURM_JOB_ID="7", **step))
    assert started.script == "scripts/train.py" and "MASTER_ADDR" not in started.env
    assert_refused(launch("run_multinode.sh", OPENPI_PYTHON=str(stand_in), SLURM_JOB_ID="7"), "srun", "MASTER_ADDR=")


@pytest.fixture
def real_doctor(tmp_path: pathlib.Path) -> pathlib.Path:
    """A stand-in that looks at the node in earnest and trains in pretence."""
    text = STAND_IN.replace("esac", f'    */doctor.py) exec {sys.executable} "$@" ;;\nesac', 1)
    assert "doctor.py" in text
    return write_program(tmp_path / "with_doctor" / "python", text)


def test_multinode_looks_at_the_node_with_trainings_own_options(stand_in):
    options = ["pi05_lerobot", "--seed", "7"]
    done = launch("run_multinode.sh", *options, OPENPI_PYTHON=str(stand_in), DATA_PATH="/data/mine", **NODE)
    seen, _ = json.loads(next(line for line in done.stderr.splitlines() if line.startswith("[[")))
    started = Started(done)
    assert pathlib.Path(seen[0]).relative_to(REPO).as_posix() == "scripts/doctor.py"
    assert seen[1:] == [started.config, *started.options, "--quick"] and "--data.path=/data/mine" in seen
    for argv, env in [
        (options, {"OPENPI_DOCTOR": "0"}),
        (["pi05_lerobot", "--help"], {}),
    ]:
        done = launch("run_multinode.sh", *argv, OPENPI_PYTHON=str(stand_in), **NODE, **env)
        assert Started(done) and "doctor.py" not in done.stderr
    done = launch("run_multinode.sh", "pi05_demo", OPENPI_PYTHON=str(stand_in), **NODE)
    assert_refused(done, "pi05_demo makes its own data", "bash run_opt.sh pi05_demo")
    done = launch("run_multinode.sh", OPENPI_PYTHON=str(stand_in), OPENPI_DOCTOR="no", **NODE)
    assert_refused(done, "OPENPI_DOCTOR=no", "OPENPI_DOCTOR=0")
    assert "doctor.py" not in launch("run_opt.sh", OPENPI_PYTHON=str(stand_in)).stderr


def test_multinode_stops_where_the_node_is_not_ready(real_doctor, tmp_path):
    env = NODE | {"OPENPI_PYTHON": str(real_doctor), "JAX_PLATFORMS": "cpu", "MASTER_ADDR": "127.0.0.1"}
    tokenizer = next((REPO / "assets" / "demo").glob("*.model"))
    options = [
        f"--data.tokenizer-path={tokenizer}",
        "--weight-loader.params-path=None",
        f"--data.path={write_dataset(tmp_path / 'd')}",
    ]
    done = launch("run_multinode.sh", "pi05_libero", *options, **env)
    assert Started(done) and "warning: " in done.stderr  # MASTER_ADDR is this node, and this is node 1

    broken = env | {"NCCL_SOCKET_IFNAME": "nothing0"}
    with node_0_of(broken) as heard:
        done = launch("run_multinode.sh", "pi05_libero", *options, **broken)
    (message,) = heard  # long before its own time was over
    assert "Rank 1 (" in message and "a look at it found what must be mended first" in message
    assert_refused(done, "NCCL interface", "NCCL_SOCKET_IFNAME=nothing0")
    assert "OPENPI_DOCTOR=0" in done.stderr
    assert Started(launch("run_multinode.sh", "pi05_libero", *options, **broken, OPENPI_DOCTOR="0"))

    with node_0_of(env) as heard:
        done = launch("run_multinode.sh", "pi05_libero", "--no-such-option", **env)
    assert done.returncode == 2 and done.stdout == "" and "no-such-option" in done.stderr
    (message,) = heard
    assert "its command line was not understood" in message


@contextlib.contextmanager
def node_0_of(env: dict[str, str]):
    """Waits for the others as node 0 does; hands out what it is told."""
    cluster = dataclasses.replace(parse(env), process_id=0)
    heard: list[str] = []

    def wait() -> None:
        try:
            roll_call(cluster, 300, lambda line: None)
        except UserError as error:
            heard.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    yield heard
    thread.join(timeout=200)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["pi05_liber"], "Did you mean pi05_libero?"),
        (["pi05_libero", "--no-such-option"], "command line was not understood"),
    ],
)
def test_training_tells_the_others_of_a_wrong_option(tmp_path, words, reason):
    env = NODE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "JAX_PLATFORMS": "cpu"}
    with node_0_of(env) as heard:
        done = subprocess.run(
            [sys.executable, REPO / "scripts" / "train.py", *words],
            env=env | {"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (message,) = heard
    assert message.startswith("Rank 1 (") and "cannot start, so nobody does: " in message and reason in message


def test_a_doctor_that_breaks_down_stops_nothing(tmp_path):
    text = STAND_IN.replace("esac", "    */doctor.py) exit 137 ;;\nesac", 1)
    killed = write_program(tmp_path / "killed" / "python", text)
    done = launch("run_multinode.sh", OPENPI_PYTHON=str(killed), **NODE)
    assert Started(done) and "exit code 137" in done.stderr


@pytest.mark.parametrize("launcher", ["run_opt.sh", "run_baseline.sh", "run_multinode.sh", "run_tests.sh"])
def test_help_starts_nothing(launcher):
    done = launch(launcher, "--help", OPENPI_PYTHON="no-such-python")
    assert done.returncode == 0 and "usage:" in done.stdout and launcher in done.stdout


def test_started_from_elsewhere_the_run_is_in_the_project(stand_in, tmp_path):
    started = Started(launch("run_opt.sh", OPENPI_PYTHON=str(stand_in), cwd=tmp_path))
    assert started.options[-2:] == [f"--assets-base-dir={REPO}/assets", f"--checkpoint-base-dir={REPO}/checkpoints"]


def test_ci_without_shared_fails(tmp_path):
    clone = copy_of_project(tmp_path)
    done = launch("run_tests.sh", root=clone, CI="true")
    assert done.returncode == 1 and "../shared is absent" in done.stderr


# --- the first run, with a stand-in for uv ----------------------------------------------------------------------------


def copy_of_project(tmp_path: pathlib.Path) -> pathlib.Path:
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("pyproject.toml", ".python-version", "run_opt.sh", "run_tests.sh"):
        shutil.copy(REPO / name, clone / name)
    for name in ("scripts", "requirements"):
        shutil.copytree(REPO / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    return clone


class FirstRun:
    """A clone with a uv beside it that makes venvs of stand-ins and writes down what it was asked."""

    def __init__(self, tmp_path: pathlib.Path, stand_in: pathlib.Path):
        self.clone = copy_of_project(tmp_path)
        self.log = tmp_path / "uv.log"
        self.bin = tmp_path / "bin"
        self.failing = tmp_path / "failing"
        write_program(
            self.bin / "uv",
            f"""#!{BASH}
            echo "$*" >>{self.log}
            case "$1" in
                venv) venv=${{!#}}; rm -rf "$venv"; mkdir -p "$venv/bin"; cp {stand_in} "$venv/bin/python" ;;
                pip) [[ ! -e {self.failing} ]] || {{ echo "no index" >&2; exit 1; }} ;;
                python) exit 1 ;;
            esac
            """,
        )
        write_program(self.bin / "python3.12", STAND_IN)
        self.path = f"{self.bin}:{os.environ['PATH']}"

    def __call__(self):
        """Starts run_opt.sh; returns it with the uv commands that it gave."""
        self.log.write_text("")
        done = launch(
            "run_opt.sh", "pi05_demo", root=self.clone, PATH=self.path, UV_DEFAULT_INDEX="file:///nonexistent"
        )
        return done, [line.split(" ")[0] for line in self.log.read_text().splitlines() if line != "--version"]


@pytest.fixture
def first_run(tmp_path, stand_in) -> FirstRun:
    return FirstRun(tmp_path, stand_in)


def test_the_first_run_installs_and_the_second_starts_at_once(first_run):
    done, commands = first_run()
    assert done.returncode == 0 and commands == ["venv", "pip"]
    assert "installing requirements/cpu.txt" in done.stderr and f"-r {first_run.clone}/requirements/cpu.txt" in (
        first_run.log.read_text()
    )
    done, commands = first_run()
    assert done.returncode == 0 and commands == [] and "installing" not in done.stderr


def test_changed_pins_are_installed(first_run):
    first_run()
    with (first_run.clone / "requirements" / "cpu.txt").open("a") as file:
        file.write("# changed\n")
    assert first_run()[1] == ["venv", "pip"]
    assert first_run()[1] == []


def test_a_failed_install_is_said_and_done_again(first_run):
    first_run.failing.touch()
    done, _ = first_run()
    assert_refused(done, "requirements/cpu.txt could not be installed", "OPENPI_PYTHON")
    first_run.failing.unlink()
    done, commands = first_run()
    assert done.returncode == 0 and commands == ["venv", "pip"]  # anew: what is half there is not trusted


def test_a_broken_environment_is_made_anew(first_run):
    first_run()
    (first_run.clone / ".venv" / "bin" / "broken").touch()  # a package is gone
    assert first_run()[1] == ["venv", "pip"]
    python = first_run.clone / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nonexistent/python3.12")  # the Python that it was made from is gone
    done, commands = first_run()
    assert done.returncode == 0 and commands == ["venv", "pip"] and "broken" in done.stderr


def test_without_any_python_there_is_one_message(first_run):
    for tool in ("bash", "cat", "cksum", "dirname", "flock", "grep", "mkdir", "paste", "rm", "sed", "tail", "touch"):
        (first_run.bin / tool).symlink_to(shutil.which(tool))
    (first_run.bin / "python3.12").unlink()
    done = launch("run_opt.sh", root=first_run.clone, PATH=str(first_run.bin), PYENV_ROOT="")
    assert_refused(done, "no Python 3.12", "OPENPI_PYTHON")


def test_starts_at_the_same_time_install_once(first_run):
    env = {"PATH": first_run.path, "HOME": "/nonexistent", "UV_DEFAULT_INDEX": "file:///nonexistent"}
    command = [BASH, "run_opt.sh", "pi05_demo"]
    first_run.log.write_text("")
    runs = [
        subprocess.Popen(command, cwd=first_run.clone, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for run in runs:
        _, stderr = run.communicate(timeout=60)
        assert run.returncode == 0, stderr.decode()
    assert sum(line.startswith("pip ") for line in first_run.log.read_text().splitlines()) == 1


def test_the_equivalence_is_runs_from_the_same_weights_and_a_comparison(stand_in: pathlib.Path, tmp_path: pathlib.Path):
    def started(**env: str) -> list[tuple[list[str], dict[str, str]]]:
        done = launch("run_equivalence.sh", str(tmp_path / "out"), OPENPI_PYTHON=str(stand_in), **env)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    # A switch of the caller's reaches no run.
    (base, _), *runs, (comparison, _) = started(STEPS="7", OPENPI_CAST_EARLY="1", XLA_FLAGS="--xla_x=1")
    folder = tmp_path / "out" / "pi05_demo"
    weights = f"--weight-loader.params-path={folder / 'base' / '149' / 'params'}"
    assert base[2] == "--exp-name=base" and "--num-train-steps=150" in base
    assert not any(word.startswith(("--lr-schedule", "--weight-loader")) for word in base)
    assert [argv[2] for argv, _ in runs] == ["--exp-name=off", "--exp-name=on", "--exp-name=control"]
    switches = [{name for name in env if name.startswith("OPENPI_")} for _, env in runs]
    assert switches == [set(), {*COMPUTE, "OPENPI_SKIP_IMAGES"}, set()]
    for argv, env in runs:
        assert {"--num-train-steps=7", "--only-train", "--lr-schedule.peak-lr=2.5e-5", weights} <= set(argv)
        assert "XLA_FLAGS" not in env
    own = [{word for word in argv if word.startswith(("--remat", "--num-microbatches"))} for argv, _ in runs]
    assert own == [set(), {"--remat.gemma=dots", "--remat.siglip=dots"}, {"--num-microbatches=2"}]
    assert comparison[1:5] == [str(folder / "off"), str(folder / "on"), "--control", str(folder / "control")]

    own = started(SCHEDULE="demo")
    assert len(own) == 4 and not any("lr-schedule" in word or "params" in word for argv, _ in own for word in argv)
    assert_refused(
        launch("run_equivalence.sh", OPENPI_PYTHON=str(stand_in), SCHEDULE="fast"), "neither finetune nor demo"
    )
