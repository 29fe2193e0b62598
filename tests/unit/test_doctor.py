"""scripts/doctor.py: each check on a good and a bad node, the report, and its exit codes. The node is made of files."""

import dataclasses
import errno
import json
import pathlib
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest

from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.presets import get_preset
from openpi_accel.data.norm_stats import NormStats, Statistics, norm_stats_path, save_norm_stats
from openpi_accel.errors import UserError
from openpi_accel.parallel.platforms import Cluster
from openpi_accel.tools.doctor import devices, files, gpus, limits, network, rdma
from openpi_accel.tools.doctor.command import main
from openpi_accel.tools.doctor.finding import Finding, examine
from openpi_accel.tools.doctor.machine import Machine, listen, run_command
from tests.lerobot_writer import write_dataset

GIB = 2**30
SMI_ROW = "{index}, GPU-{index}a-b, NVIDIA H200, {driver}, {used}, 143771, {busy}"
EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:a288:c2ff:fe3b:506a"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0007"  # 10.0.0.7


def write(path: pathlib.Path, text: str = "") -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def limit(soft: int, hard: int | None = None) -> limits.GetLimit:
    return lambda which: (soft, soft if hard is None else hard)


def disk(total_gib: float, free_gib: float) -> limits.DiskUsage:
    usage = shutil._ntuple_diskusage(int(total_gib * GIB), int((total_gib - free_gib) * GIB), int(free_gib * GIB))
    return lambda folder: usage


def smi(*rows: str, header: str = "CUDA Version: 13.0") -> gpus.Run:
    """An nvidia-smi that lists `rows`."""
    return lambda command: header if len(command) == 1 else "\n".join(rows) + "\n"


def row(index: int = 0, driver: str = "580.65.06", used: object = 4, busy: object = 0) -> str:
    return SMI_ROW.format(index=index, driver=driver, used=used, busy=busy)


def failing(error: Exception) -> Callable[..., Sequence[str]]:
    def call(*_: object) -> Sequence[str]:
        raise error

    return call


def rdma_port(
    sys: pathlib.Path, name: str = "mlx5_0", link: str = "InfiniBand", state: str = "4: ACTIVE", **gids: tuple[str, str]
) -> None:
    """A port as the kernel shows it; gids g0=(type, address)."""
    port = sys / "class" / "infiniband" / name / "ports" / "1"
    for file, text in {"link_layer": link, "state": state, "rate": "400 Gb/sec (4X NDR)"}.items():
        write(port / file, f"{text}\n")
    for key, (protocol, address) in gids.items():
        write(port / "gids" / key[1:], f"{address}\n")
        if protocol:
            write(port / "gid_attrs" / "types" / key[1:], f"{protocol}\n")


ROCE = {
    "g0": ("IB/RoCE v1", LINK_LOCAL),
    "g1": ("RoCE v2", LINK_LOCAL),
    "g2": ("IB/RoCE v1", IPV4),
    "g3": ("RoCE v2", IPV4),
    "g4": ("", EMPTY_GID),
    "g5": ("RoCE v2", EMPTY_GID),
    "g6": ("RoCE v2", "no address"),
}


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Machine:
    """A healthy node with two GPUs, one InfiniBand port and two network interfaces."""
    root = tmp_path / "node"
    for name in ("eth0", "lo"):
        write(root / "sys" / "class" / "net" / name / "operstate", "up\n")
    rdma_port(root / "sys")
    write(root / "dev" / "infiniband" / "uverbs0")
    (root / "dev" / "shm").mkdir()
    write(root / "proc" / "self" / "status", "Name:\tpython\nCapEff:\t0000000000000000\n")
    return Machine(
        proc=root / "proc",
        sys=root / "sys",
        dev=root / "dev",
        getrlimit=limit(resource.RLIM_INFINITY),
        disk_usage=disk(1000, 900),
        run=smi(row(0), row(1)),
        resolve=lambda host: ["10.0.0.1"],
        listen=lambda port: None,
        cuda_versions=lambda: {13},
    )


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soft", "capabilities", "uses_rdma", "level"),
    [
        (resource.RLIM_INFINITY, "0", True, "ok"),
        (8 * 2**20, "0", True, "warning"),
        (64 * 2**10, "0", True, "error"),
        (64 * 2**10, "0", False, "ok"),
        (64 * 2**10, "0000000000004000", True, "ok"),  # CAP_IPC_LOCK is bit 14
        (64 * 2**10, "0000000000002000", True, "error"),
    ],
)
def test_memlock(tmp_path: pathlib.Path, soft: int, capabilities: str, uses_rdma: bool, level: str) -> None:
    write(tmp_path / "self" / "status", f"CapEff:\t{capabilities}\n")
    found = limits.memlock(limit(soft), tmp_path, rdma=uses_rdma)
    assert found.level == level
    assert ("--ulimit memlock=-1:-1" in found.advice) == (level != "ok")


def test_open_files() -> None:
    assert limits.open_files(limit(1048576)).level == limits.open_files(limit(resource.RLIM_INFINITY)).level == "ok"
    soft = limits.open_files(limit(1024, 1048576))
    hard = limits.open_files(limit(1024, 4096))
    assert soft.level == hard.level == "warning" and "1024" in soft.seen
    assert "ulimit -n" in soft.advice and "--ulimit nofile" in hard.advice


def test_shared_memory(tmp_path: pathlib.Path) -> None:
    assert "--shm-size" in limits.shared_memory(disk(9, 9), tmp_path).advice  # there is none
    (tmp_path / "shm").mkdir()
    assert limits.shared_memory(disk(16, 16), tmp_path).level == "ok"
    small = limits.shared_memory(disk(1 / 16, 1 / 16), tmp_path)  # a container's default of 64 MiB
    assert small.level == "warning" and "--shm-size" in small.advice and "--ipc=host" in small.advice
    full = limits.shared_memory(disk(16, 0.5), tmp_path)
    assert full.level == "warning" and "Delete" in full.advice


# --- RDMA -------------------------------------------------------------------------------------------------------------


def test_ports_are_read(tmp_path: pathlib.Path) -> None:
    assert rdma.read_ports(tmp_path) == []
    for name in ("mlx5_10", "mlx5_9"):
        rdma_port(tmp_path, name, link="Ethernet", **ROCE)
    ports = rdma.read_ports(tmp_path)
    assert [port.name for port in ports] == ["mlx5_9:1", "mlx5_10:1"]
    assert (ports[0].link_layer, ports[0].state, ports[0].rate) == ("Ethernet", "ACTIVE", "400 Gb/sec (4X NDR)")
    assert list(ports[0].gids) == [0, 1, 2, 3]  # empty and unreadable entries are left out
    assert str(ports[0].gids[3]) == "RoCE v2, 10.0.0.7"


def test_rdma_devices(tmp_path: pathlib.Path) -> None:
    sys, dev = tmp_path / "sys", tmp_path / "dev"

    def look(**env: str) -> tuple[Finding, bool]:
        ports = rdma.read_ports(sys)
        return rdma.devices(ports, dev, env), rdma.is_used(ports, dev, env)

    found, used = look()
    assert found.level == "ok" and "TCP" in found.seen and not used
    rdma_port(sys, state="1: DOWN")
    found, used = look()
    assert found.level == "warning" and "--device=/dev/infiniband" in found.advice and not used
    write(dev / "infiniband" / "uverbs0")
    found, used = look()
    assert found.level == "warning" and "none is active" in found.seen and not used
    rdma_port(sys, "mlx5_1")
    found, used = look(NCCL_IB_DISABLE="0")
    assert found.level == "ok" and "2 ports" in found.seen and used
    found, used = look(NCCL_IB_DISABLE="1")
    assert found.level == "ok" and "NCCL_IB_DISABLE=1" in found.seen and not used


def test_infiniband_ports(tmp_path: pathlib.Path) -> None:
    rdma_port(tmp_path, "mlx5_0", g0=("IB/RoCE v1", LINK_LOCAL))
    rdma_port(tmp_path, "mlx5_1", state="1: DOWN")
    ports = rdma.read_ports(tmp_path)
    up, down = rdma.port_findings(ports, {"NCCL_IB_GID_INDEX": "3"})  # means nothing on InfiniBand
    assert (up.level, up.seen) == ("ok", "InfiniBand, ACTIVE, 400 Gb/sec (4X NDR)")
    assert down.level == "warning" and "DOWN" in down.seen
    assert [found.level for found in rdma.port_findings(ports, {"NCCL_IB_DISABLE": "1"})] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("chosen", "level", "words"),
    [
        ("", "ok", "chooses by itself"),
        ("-1", "ok", "chooses by itself"),
        ("3", "ok", "is RoCE v2, 10.0.0.7"),
        ("2", "warning", "is IB/RoCE v1, 10.0.0.7"),
        ("1", "warning", "is RoCE v2, fe80::"),
        ("5", "warning", "no address"),
        ("three", "warning", "no address"),
    ],
)
def test_gid_index(tmp_path: pathlib.Path, chosen: str, level: str, words: str) -> None:
    rdma_port(tmp_path, link="Ethernet", **ROCE)
    (found,) = rdma.port_findings(rdma.read_ports(tmp_path), {"NCCL_IB_GID_INDEX": chosen})
    assert found.level == level and words in found.seen and "GID index 3" in found.seen
    assert ("NCCL_IB_GID_INDEX=3" in found.advice) == (level == "warning")


def test_roce_without_an_ipv4_address(tmp_path: pathlib.Path) -> None:
    rdma_port(tmp_path, link="Ethernet", g0=ROCE["g0"], g1=ROCE["g1"])
    (found,) = rdma.port_findings(rdma.read_ports(tmp_path), {})
    assert found.level == "warning" and "GID index none" in found.seen and "IPv4" in found.advice


# --- network ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "level", "words"),
    [
        ("", "ok", "not set"),
        ("eth", "ok", "leaves eth0, eth1 of"),
        ("=eth0", "ok", "leaves eth0 of"),
        ("=eth0,ib7", "warning", "leaves eth0 of"),
        ("=eth", "error", "leaves none of eth0, eth1, ib0, lo"),
        ("bond0", "error", "leaves none"),
        ("ib", "warning", "down"),
        ("^docker,lo", "ok", "leaves eth0, eth1, ib0 of"),
        ("^=eth0", "ok", "leaves eth1, ib0 of"),
        ("^eth,ib", "error", "leaves none"),
    ],
)
def test_socket_interface(tmp_path: pathlib.Path, value: str, level: str, words: str) -> None:
    for name, state in {"eth0": "up", "eth1": "up", "ib0": "down", "lo": "unknown"}.items():
        write(tmp_path / "class" / "net" / name / "operstate", f"{state}\n")
    write(tmp_path / "class" / "net" / "bonding_masters")  # a file among the interfaces
    found = network.socket_interface({"NCCL_SOCKET_IFNAME": value}, tmp_path)
    assert found.level == level and words in found.seen
    assert bool(found.advice) == (level != "ok")


def test_nccl_settings_are_shown() -> None:
    env = {"NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "INFO", "PATH": "/bin"}
    assert network.nccl_settings(env).seen == "NCCL_DEBUG=INFO NCCL_IB_HCA=mlx5"
    assert network.nccl_settings({}).level == "ok"


def node_of_two(rank: int, host: str = "node0", port: int = 29500) -> Cluster:
    return Cluster(host=host, port=port, num_processes=2, process_id=rank, started_by="a test")


def test_coordinator() -> None:
    def look(rank: int, addresses: list[str]) -> Finding:
        return network.coordinator(node_of_two(rank), lambda host: addresses)

    assert network.coordinator(None, failing(OSError())).level == "ok"
    found = look(1, ["10.0.0.1", "10.0.0.1"])
    assert found.level == "ok"
    assert found.seen == "started by a test: node 1 of 2, coordinator node0:29500, which is 10.0.0.1"
    absent = network.coordinator(node_of_two(1, "nod0"), failing(socket.gaierror(-2, "Name or service not known")))
    assert absent.level == "warning" and "nod0" in absent.seen and "not known" in absent.seen
    assert look(0, ["127.0.1.1", "::1"]).level == "ok"
    assert look(1, ["127.0.1.1", "::1"]).level == "warning"
    assert look(1, ["fe80::1%eth0"]).level == "ok"


def test_coordinators_port() -> None:
    taken = failing(OSError(errno.EADDRINUSE, "Address already in use"))
    assert network.coordinator_port(None, taken).level == "ok"
    assert network.coordinator_port(node_of_two(1), taken).level == "unknown"
    assert network.coordinator_port(node_of_two(0), lambda port: None).level == "ok"
    found = network.coordinator_port(node_of_two(0), taken)
    assert found.level == "error" and "29500: Address already in use" in found.seen and "MASTER_PORT" in found.advice
    refused = network.coordinator_port(node_of_two(0, port=80), failing(OSError(errno.EACCES, "Permission denied")))
    assert refused.level == "error" and "29500" in refused.advice


def test_nodes_are_what_training_takes_them_for(capsys: pytest.CaptureFixture[str], node: Machine) -> None:
    srun = {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[07-08]"}
    _, findings = look(capsys, node, "--quick", SLURM_JOB_ID="7", **srun)
    assert findings["coordinator"].seen.startswith("started by Slurm: node 1 of 2, coordinator gpu07:61447")
    assert findings["coordinator's port"].level == "unknown"
    code, findings = look(capsys, node, "--quick", MASTER_ADDR="node0", WORLD_SIZE="2")
    assert code == 1 and findings["nodes"].level == "error" and "coordinator" not in findings
    assert "MASTER_PORT is not set (nor RANK)" in findings["nodes"].advice


def test_a_port_that_is_listened_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError) as caught:
            listen(port)
        assert caught.value.errno == errno.EADDRINUSE
    listen(port)


def test_offline_and_proxy() -> None:
    assert network.offline({"HF_HUB_OFFLINE": "1"}).seen == "HF_HUB_OFFLINE=1"
    assert network.offline({}).level == network.proxy({}, None).level == "ok"
    env = {"HTTPS_PROXY": "http://me:secret@proxy:3128"}
    cluster = node_of_two(1, "10.0.0.1")
    found = network.proxy(env, cluster)
    assert found.level == "warning" and "//***@proxy:3128" in found.seen and "secret" not in found.seen
    assert "no_proxy=10.0.0.1" in found.advice
    assert network.proxy(env | {"no_proxy": "localhost,10.0.0.0/8"}, cluster).level == "ok"
    assert network.proxy(env | {"no_proxy": "*.cluster"}, node_of_two(1, "node0.cluster")).level == "ok"
    assert network.proxy({"HTTPS_PROXY": "http://proxy"}, None).level == "ok"


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_healthy_gpus() -> None:
    present, driver, idle = gpus.survey(smi(row(0), row(1)), {"NPROC_PER_NODE": "2"}, {12, 13})
    assert (present.level, present.seen) == ("ok", "2 x NVIDIA H200")
    assert (driver.level, driver.seen) == ("ok", "driver 580.65.06, CUDA 13")
    assert idle.level == "ok"


def test_no_gpus() -> None:
    absent = failing(FileNotFoundError(2, "No such file", "nvidia-smi"))
    (found,) = gpus.survey(absent, {}, {13})
    assert found.level == "unknown" and "no nvidia-smi" in found.seen
    assert gpus.survey(absent, {"JAX_PLATFORMS": "cpu"}, {13})[0].level == "ok"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (subprocess.CalledProcessError(9, "nvidia-smi", "library version\nmismatch", ""), "library version mismatch"),
        (subprocess.TimeoutExpired("nvidia-smi", 30), "timed out"),
    ],
)  # fmt: skip
def test_a_sick_driver(error: Exception, words: str) -> None:
    (found,) = gpus.survey(failing(error), {}, {13})
    assert found.level == "error" and words in found.seen and "JAX_PLATFORMS=cpu" in found.advice


@pytest.mark.parametrize(
    ("version", "cuda", "header", "level"),
    [
        ("550.54.15", {12}, "CUDA Version: 12.4", "ok"),
        ("470.1", {12}, "CUDA Version: 11.4", "error"),
        ("550.54.15", {13}, "CUDA Version: 12.4", "error"),
        ("550.54.15", {13}, "CUDA Version: 13.0", "warning"),  # lifted by compatibility libraries
        ("580.65.06", set(), "", "error"),
    ],
)
def test_driver(version: str, cuda: set[int], header: str, level: str) -> None:
    _, found, _ = gpus.survey(smi(row(driver=version), header=header), {}, cuda)
    assert found.level == level and bool(found.advice) == (level != "ok")
    if cuda == {13}:
        assert "580" in found.advice and "cuda12.txt" in found.advice


def test_busy_gpus() -> None:
    rows = (row(0, used=70000), row(1, busy=98), row(2, used="[N/A]", busy="[N/A]"))
    *_, found = gpus.survey(smi(*rows), {}, {13})
    assert found.level == "warning" and "GPU 0: 70000 MiB" in found.seen and "GPU 1: 4 MiB, 98 %" in found.seen
    assert "GPU 2" not in found.seen
    *_, found = gpus.survey(smi(*rows), {"CUDA_VISIBLE_DEVICES": "2"}, {13})
    assert found.level == "ok"


@pytest.mark.parametrize(
    ("value", "indices"),
    [("0,2", "02"), ("GPU-1a", "1"), ("2,7,1", "2"), ("", ""), ("-1", ""), ("MIG-x", "012")],
)
def test_visible_devices(value: str, indices: str) -> None:
    found = gpus.query(smi(row(0), row(1), row(2)))
    assert "".join(gpu.index for gpu in gpus.visible(found, {"CUDA_VISIBLE_DEVICES": value})) == indices
    assert gpus.visible(found, {}) == found


def test_missing_gpus() -> None:
    present, *_ = gpus.survey(smi(row(0), row(1)), {"NPROC_PER_NODE": "8"}, {13})
    assert present.level == "warning" and "NPROC_PER_NODE=8" in present.seen
    present, *_ = gpus.survey(smi(row(0), row(1)), {"CUDA_VISIBLE_DEVICES": "-1"}, {13})
    assert present.level == "error" and "leaves 0" in present.seen
    assert gpus.survey(smi(row(0), row(1)), {"NPROC_PER_NODE": "1"}, {13})[0].level == "ok"


def test_commands_are_run(tmp_path: pathlib.Path) -> None:
    assert run_command(["sh", "-c", "echo yes"]) == "yes\n"
    with pytest.raises(subprocess.CalledProcessError):
        run_command(["sh", "-c", "exit 3"])
    with pytest.raises(OSError):
        run_command([str(tmp_path / "nothing")])


# --- JAX --------------------------------------------------------------------------------------------------------------


def test_jax_devices() -> None:
    assert devices.jax_devices(2, lambda: ["gpu", "gpu"]).level == "ok"
    found = devices.jax_devices(0)
    assert (found.level, found.seen) == ("ok", "8 x cpu")
    found = devices.jax_devices(8, lambda: ["cpu"])
    assert found.level == "error" and "1 x cpu; nvidia-smi has 8 GPUs" in found.seen
    assert devices.jax_devices(8, failing(RuntimeError("no driver"))).level == "error"


def test_first_all_reduce() -> None:
    done = devices.time_all_reduce()
    assert done.correct and done.num_devices == jax.local_device_count() == 8 and 0 < done.seconds < 30
    assert devices.first_collective(lambda: done).level == "ok"
    assert devices.first_collective(lambda: dataclasses.replace(done, seconds=31.0)).level == "warning"
    assert devices.first_collective(lambda: dataclasses.replace(done, correct=False)).level == "error"

    def broken() -> devices.AllReduce:
        raise RuntimeError("NCCL operation failed")

    found = devices.first_collective(broken)
    assert found.level == "error" and "NCCL operation failed" in found.seen and "NCCL_DEBUG" in found.advice


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_stated_size_is_the_computed_one() -> None:
    config = get_preset("pi05_libero")
    stated = files.stated_checkpoint_gib(config)
    assert stated is not None and devices.checkpoint_gib(config) == pytest.approx(stated, rel=0.01)
    assert files.stated_checkpoint_gib(None) == stated
    assert files.stated_checkpoint_gib(dataclasses.replace(config, ema_decay=None)) == pytest.approx(stated * 3 / 4)
    assert files.stated_checkpoint_gib(get_preset("pi05_demo")) is None


def test_checkpoint_folder(tmp_path: pathlib.Path) -> None:
    assert files.checkpoint_folder(tmp_path).seen == f"{tmp_path} can be written"
    found = files.checkpoint_folder(tmp_path / "a" / "b")
    assert found.level == "ok" and f"made in {tmp_path}" in found.seen
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind
    file = write(tmp_path / "file")
    for folder in (file / "below", pathlib.Path("/proc/checkpoints")):  # neither takes files, not even root's
        found = files.checkpoint_folder(folder)
        assert found.level == "error" and "--checkpoint-base-dir" in found.advice


@pytest.mark.parametrize(
    ("free", "size", "exact", "level"),
    [(101, 50.0, False, "ok"), (99, 50.0, True, "warning"), (40, 50.0, True, "error"), (40, 50.0, False, "warning"),
     (1, None, False, "ok")],
)  # fmt: skip
def test_free_disk(tmp_path: pathlib.Path, free: float, size: float | None, exact: bool, level: str) -> None:
    found = files.free_disk(tmp_path / "later", disk(1000, free), size, exact=exact)
    assert found.level == level and f"{free:.1f} GiB free" in found.seen
    assert ("--checkpoint-base-dir" in found.advice) == (level != "ok")


@pytest.fixture
def files_there(tmp_path: pathlib.Path, repo: pathlib.Path) -> list[str]:
    """A run's options with which everything is found."""
    size = 4
    part = Statistics(mean=np.zeros(size), std=np.ones(size), q01=-np.ones(size), q99=np.ones(size))
    save_norm_stats(
        norm_stats_path(tmp_path / "assets", "pi05_lerobot", "local/d"), NormStats(state=part, actions=part)
    )
    write(tmp_path / "base" / "params" / "_METADATA", "{}")
    return [
        "pi05_lerobot",
        f"--data.path={write_dataset(tmp_path / 'd')}",
        f"--data.tokenizer-path={next((repo / 'assets' / 'demo').glob('*.model'))}",
        f"--assets-base-dir={tmp_path / 'assets'}",
        f"--weight-loader.params-path={tmp_path / 'base'}",
        f"--checkpoint-base-dir={tmp_path / 'checkpoints'}",
    ]


def look(capsys: pytest.CaptureFixture[str], node: Machine, *argv: str, **env: str) -> tuple[int, dict[str, Finding]]:
    """Exit code and findings by name, from the JSON."""
    code = main([*argv, "--json"], {"HOME": "/nowhere"} | env, node)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    content = json.loads(lines[0])
    assert list(content) == ["findings"]
    findings = [Finding(**entry) for entry in content["findings"]]
    assert len({found.name for found in findings}) == len(findings)
    return code, {found.name: found for found in findings}


def test_a_healthy_node_with_all_files(
    capsys: pytest.CaptureFixture[str], node: Machine, files_there: list[str]
) -> None:
    code, findings = look(capsys, node, *files_there, "--quick")
    assert code == 0 and {found.level for found in findings.values()} == {"ok"}
    assert {"memlock", "RDMA port mlx5_0:1", "GPU driver", "dataset", "base weights"} <= set(findings)
    assert not {"JAX devices", "first all-reduce"} & set(findings)
    assert "LeRobot v2" in findings["dataset"].seen


def test_the_whole_look(capsys: pytest.CaptureFixture[str], node: Machine, files_there: list[str]) -> None:
    tiny = [f"--model.{name}" for name in ("paligemma-variant=tiny", "action-expert-variant=tiny_expert")]
    node = dataclasses.replace(node, disk_usage=disk(1000, 0.001))
    code, findings = look(
        capsys, node, *files_there, *tiny, "--model.vision-variant=tiny", "--model.vocab-size=512", JAX_PLATFORMS="cpu"
    )
    assert code == 1 and [name for name, found in findings.items() if found.level == "error"] == ["free disk"]
    assert "one checkpoint takes 4.3 MiB" in findings["free disk"].seen
    assert findings["JAX devices"].seen == "8 x cpu" and "over 8 devices" in findings["first all-reduce"].seen
    assert "frames" in findings["dataset"].seen


def test_missing_files(capsys: pytest.CaptureFixture[str], node: Machine, tmp_path: pathlib.Path) -> None:
    options = ["pi05_lerobot", f"--data.path={tmp_path / 'none'}", f"--assets-base-dir={tmp_path}", "--quick"]
    code, findings = look(capsys, node, *options)
    assert code == 1
    for name, words in {
        "dataset": "DATA_PATH",
        "tokenizer": "curl",
        "norm statistics": "compute_norm_stats.py",
        "base weights": "BASE_CHECKPOINT_PATH",
    }.items():
        assert findings[name].level == "error" and words in findings[name].advice
    _, findings = look(capsys, node, *options, "--resume")
    assert findings["base weights"].level == "ok"


def test_wrong_files(tmp_path: pathlib.Path) -> None:
    config, environment = get_preset("pi05_lerobot"), Environment.from_env({"HOME": str(tmp_path)})
    data = dataclasses.replace(
        config.data, path=str(tmp_path), tokenizer_path=str(write(tmp_path / "t.model", "no model"))
    )
    config = dataclasses.replace(config, data=data, assets_base_dir=str(tmp_path))
    write(norm_stats_path(tmp_path, config.name, config.asset_id), "{}")
    assert "info.json" in files.dataset(config, environment, quick=True).advice
    assert "SentencePiece" in files.tokenizer(config, environment).advice
    assert "not a file of normalisation statistics" in files.norm_statistics(config).advice
    fresh = dataclasses.replace(config, weight_loader=dataclasses.replace(config.weight_loader, params_path=None))
    assert files.base_weights(fresh, environment).level == "ok"


# --- the report -------------------------------------------------------------------------------------------------------


def test_an_error_is_exit_code_1(capsys: pytest.CaptureFixture[str], node: Machine) -> None:
    code, findings = look(capsys, node, "--quick", NCCL_SOCKET_IFNAME="bond0")
    assert code == 1 and findings["NCCL interface"].level == "error"


def test_a_warning_is_not(capsys: pytest.CaptureFixture[str], node: Machine) -> None:
    code, findings = look(capsys, dataclasses.replace(node, getrlimit=limit(2**20)), "--quick")
    assert code == 0 and findings["memlock"].level == "warning"


def test_the_table(capsys: pytest.CaptureFixture[str], node: Machine, tmp_path: pathlib.Path) -> None:
    options = [f"--checkpoint-base-dir={tmp_path}", "--quick"]
    assert main(options, {"NCCL_SOCKET_IFNAME": "bond0", "NCCL_X": "[red]"}, node) == 1
    out = capsys.readouterr().out
    assert f"{tmp_path} can be written" in out and "NCCL_X=[red]" in out
    advice = [line for line in out.splitlines() if line.startswith(("error: ", "warning: "))]
    assert len(advice) == 1 and advice[0].startswith("error: NCCL interface: NCCL_SOCKET_IFNAME=bond0 leaves none")


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["pi05_liber"], "pi05_libero"), (["--checkpoint-base-dir"], "not understood"), (["--nonsense"], "config name")],
)
def test_wrong_usage(node: Machine, argv: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        main([*argv, "--quick"], {}, node)


def test_training_knows_the_launchers_switch() -> None:
    assert Acceleration.from_env({"OPENPI_DOCTOR": "0"}) == Acceleration()


def test_a_check_that_fails_stops_nothing() -> None:
    good = Finding(name="b", level="ok", seen="fine")

    def broken() -> Finding:
        raise ZeroDivisionError("oh")

    first, *rest = examine([("a", broken), ("b", lambda: good), ("c", lambda: [good, good])])
    assert (first.name, first.level) == ("a", "unknown") and "ZeroDivisionError: oh" in first.seen
    assert rest == [good] * 3
