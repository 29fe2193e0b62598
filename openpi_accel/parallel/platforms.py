"""Which process of how many this is, from the variables of the platform that started it. Pure, and without JAX.

A row of `PLATFORMS` says which of a platform's variables hold what. MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE,
where the user or the platform sets them, win over every row, one by one.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

from openpi_accel.errors import UserError
from openpi_accel.parallel.hostlist import expand_hosts

# Where a platform names no port. Fixed, so that a firewall can be opened for it.
DEFAULT_PORT = 29500
# Two jobs may share a Slurm node, so each takes a port of its own. The range lies above the ports that Linux hands out
# to outgoing connections (net.ipv4.ip_local_port_range, by default 32768 to 60999).
SLURM_PORTS = range(61440, 65536)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where the coordinator listens, and which of how many processes this is.

    Attributes:
        host: name or address of the node of process 0, as the others reach it.
        port: the coordinator's port there.
        num_processes: of all nodes, one per node.
        process_id: from 0.
        started_by: the platform, for people.
        hosts: the nodes' names in the order of their processes, where the platform tells them; else empty.
        gpus_per_node: as NPROC_PER_NODE tells it, where nothing else tells the number of nodes.
    """

    host: str
    port: int
    num_processes: int
    process_id: int
    started_by: str
    hosts: tuple[str, ...] = ()
    gpus_per_node: int | None = None

    @property
    def coordinator_address(self) -> str:
        """host:port, as gRPC wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def describe(self) -> str:
        """One line on what was recognised."""
        size, gpus = self.num_processes, self.gpus_per_node or 1
        line = f"started by {self.started_by}: node {self.process_id} of {size}, coordinator {self.coordinator_address}"
        if gpus == 1 or size % gpus:
            return line
        return f"{line}. Should these be {size} GPUs, {gpus} on each node: export WORLD_SIZE={size // gpus}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
    """A row of the table: names of variables; "" where the platform has none for it.

    Attributes:
        name: for people.
        signs: all of them are set where this platform started the process.
        size: number of processes.
        rank: index of this process.
        address: host of process 0.
        port: the coordinator's port.
        hosts: the nodes in Slurm's short form, the first non-empty of them counts.
        per_node: processes on each node.
        one_per_node: what starts one process per node.
        advice: how to set what the platform does not tell.
    """

    name: str
    signs: tuple[str, ...]
    size: str = ""
    rank: str = ""
    address: str = ""
    port: str = ""
    hosts: tuple[str, ...] = ()
    per_node: str = ""
    one_per_node: str = ""
    advice: str = ""


_MPI_ADVICE = "MPI does not tell where rank 0 runs: hand the first host of your list on, for example {example}."
# The order counts. Kubeflow's and Open MPI's processes may also carry the variables of the JobSet or of the Slurm job
# below them. `srun --mpi=pmi2` sets PMI_ too, but not MPI_LOCALNRANKS, so Slurm stands between the two PMI rows.
PLATFORMS = (
    Platform(
        name="Kubeflow (PET_ variables)",
        signs=("PET_NNODES",),
        size="PET_NNODES",
        rank="PET_NODE_RANK",
        address="PET_MASTER_ADDR",
        port="PET_MASTER_PORT",
        advice="An elastic job leaves them to torchrun; leave elasticPolicy out of the manifest.",
    ),
    Platform(
        name="Open MPI",
        signs=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        per_node="OMPI_COMM_WORLD_LOCAL_SIZE",
        one_per_node="mpirun --map-by ppr:1:node",
        advice=_MPI_ADVICE.format(example="mpirun -x MASTER_ADDR=node01"),
    ),
    Platform(
        name="MPICH or Intel MPI",
        signs=("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
        size="PMI_SIZE",
        rank="PMI_RANK",
        per_node="MPI_LOCALNRANKS",
        one_per_node="mpiexec -ppn 1",
        advice=_MPI_ADVICE.format(example="mpiexec -genv MASTER_ADDR node01"),
    ),
    # srun alone sets the variables of a step. A batch script and the shell of salloc have those of the job, but are
    # one process; where salloc starts its shell as a step, that step has one task.
    Platform(
        name="Slurm",
        signs=("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        size="SLURM_STEP_NUM_TASKS",
        rank="SLURM_NODEID",  # with one task per node the task's index too, and surely in the order of the node list
        hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        per_node="SLURM_STEP_TASKS_PER_NODE",
        one_per_node="srun --ntasks-per-node=1",
        advice="srun tells all of it; see whether its SLURM_ variables reach the container (env | grep SLURM_).",
    ),
    Platform(
        name="MPI (PMI variables)",
        signs=("PMI_RANK", "PMI_SIZE"),
        size="PMI_SIZE",
        rank="PMI_RANK",
        advice=_MPI_ADVICE.format(example="mpiexec -genv MASTER_ADDR node01"),
    ),
    Platform(
        name="a Kubernetes JobSet or indexed Job",
        signs=("JOB_COMPLETION_INDEX",),
        rank="JOB_COMPLETION_INDEX",
        advice=(
            "Kubernetes tells a pod its index alone. Set WORLD_SIZE in the manifest to the number of pods, and "
            "MASTER_ADDR to the name of pod 0 in the headless service, <jobset>-<replicatedjob>-0-0.<subdomain> "
            "(docs/multinode.md has a whole manifest)."
        ),
    ),
)

_WHAT = {
    "MASTER_ADDR": ("the host name or address of node 0, as the others reach it", "10.0.0.1"),
    "MASTER_PORT": ("a free port of node 0", "29500"),
    "RANK": ("the index of this node", "0"),
    "WORLD_SIZE": ("the number of nodes (not of GPUs)", "2"),
    "NPROC_PER_NODE": ("the number of GPUs of each node", "8"),
}
_NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_EXAMPLE = "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 RANK=0 WORLD_SIZE=2"
_TORCHRUN_WORDS = ("auto", "gpu", "cpu")  # torchrun's --nproc-per-node takes them; they tell no number
_MOST_NODES = 100_000


def recognise(env: Mapping[str, str]) -> Platform | None:
    """The first row whose signs are all set."""
    return next((row for row in PLATFORMS if all(_get(env, name) for name in row.signs)), None)


def parse(env: Mapping[str, str]) -> Cluster | None:
    """The cluster that `env` describes; None means one node. Pure.

    Raises:
        UserError: variables are missing or wrong (all of them are named), WORLD_SIZE counts GPUs, or a node has several
            processes.
    """
    explicit = {name: _get(env, name) for name in _NAMES if _get(env, name)}
    if _is_one(explicit.get("WORLD_SIZE")):
        return None
    platform = recognise(env) if len(explicit) < len(_NAMES) else None
    told = _told(platform, env) if platform else {}
    if "WORLD_SIZE" not in explicit:
        if _is_one(told.get("WORLD_SIZE")):
            return None
        # An indexed Job may as well be many runs of one node each.
        if not explicit and not (platform and (platform.size or _get(env, "JOBSET_NAME"))):
            return None
    if platform:
        _refuse_several_per_node(platform, env)
    given, problems = told | explicit, []

    def attempt[T](read: Callable[[], T]) -> T | None:
        """All that is wrong is told at once."""
        try:
            return read()
        except UserError as error:
            problems.append(str(error))
            return None

    def number(name: str, least: int, most: int) -> int | None:
        source = name if name in explicit or not platform else _source(platform, name)
        return attempt(lambda: _integer(source, given[name], least, most, name)) if name in given else None

    attempt(lambda: _refuse_missing(given, explicit, platform, env))
    world_size = number("WORLD_SIZE", 1, _MOST_NODES)
    gpus = attempt(lambda: _gpus_per_node(env))
    if world_size is not None:
        attempt(lambda: _refuse_gpu_count(env, world_size, gpus))
    rank = number("RANK", 0, (world_size or _MOST_NODES) - 1)
    port = number("MASTER_PORT", 1, 65535)
    host = attempt(lambda: _host(given["MASTER_ADDR"])) if "MASTER_ADDR" in given else None
    if problems:
        raise UserError("\n".join(problems))
    assert host is not None and port is not None and rank is not None and world_size is not None
    hosts = _hosts(platform, env)
    return Cluster(
        host=host,
        port=port,
        num_processes=world_size,
        process_id=rank,
        started_by=_started_by(platform, explicit),
        hosts=hosts if len(hosts) == world_size else (),
        gpus_per_node=None if _num_nodes(env) else gpus,
    )


def require_several(env: Mapping[str, str]) -> None:
    """For launchers of several nodes: `parse`, and something must say how many there are, be it one.

    Raises:
        UserError: as `parse`, or nothing in `env` tells of nodes.
    """
    if parse(env) is None and recognise(env) is None and not _get(env, "WORLD_SIZE"):
        raise UserError(
            f"MASTER_ADDR is not set, nor anything else that tells of several nodes. Set all of {', '.join(_NAMES)} on "
            f"every node, for example {_EXAMPLE}{_srun_hint(env)}. For one node: run_opt.sh."
        )


def _told(platform: Platform, env: Mapping[str, str]) -> dict[str, str]:
    """What the platform says, under the four plain names."""
    told = {
        name: _get(env, variable)
        for name, variable in (
            ("MASTER_ADDR", platform.address),
            ("MASTER_PORT", platform.port),
            ("RANK", platform.rank),
            ("WORLD_SIZE", platform.size),
        )
        if variable
    }
    if platform.size == "PET_NNODES":
        told["WORLD_SIZE"] = _fixed_size(told["WORLD_SIZE"])
    if hosts := _hosts(platform, env):
        told["MASTER_ADDR"] = hosts[0]
    jobset, job = _get(env, "JOBSET_NAME"), _get(env, "REPLICATED_JOB_NAME")
    if platform.rank == "JOB_COMPLETION_INDEX" and jobset and job:
        told["MASTER_ADDR"] = f"{jobset}-{job}-0-0.{_get(env, 'JOBSET_SUBDOMAIN') or jobset}"
    told = {name: value for name, value in told.items() if value}
    job_id = _get(env, "SLURM_JOB_ID")
    if platform.hosts and re.fullmatch(r"[0-9]+", job_id):
        told.setdefault("MASTER_PORT", str(SLURM_PORTS[int(job_id) % len(SLURM_PORTS)]))
    told.setdefault("MASTER_PORT", str(DEFAULT_PORT))
    return told


def _hosts(platform: Platform | None, env: Mapping[str, str]) -> tuple[str, ...]:
    name = next((name for name in platform.hosts if _get(env, name)), None) if platform else None
    return expand_hosts(_get(env, name), name) if name else ()


def _fixed_size(value: str) -> str:
    """PET_NNODES may be a range, least:most."""
    least, _, most = value.partition(":")
    if most and least != most:
        raise UserError(
            f"PET_NNODES={value} is a range, but this program trains on a fixed number of nodes. Set minReplicas and "
            f"maxReplicas to the same number, or say it yourself, for example WORLD_SIZE={most}."
        )
    return least


def _source(platform: Platform, name: str) -> str:
    """The platform's variable behind a plain name."""
    by_name = {"MASTER_ADDR": platform.address, "MASTER_PORT": platform.port, "RANK": platform.rank}
    return (by_name | {"WORLD_SIZE": platform.size}).get(name) or name


def _started_by(platform: Platform | None, explicit: Mapping[str, str]) -> str:
    if platform is None:
        return f"the variables {', '.join(_NAMES)}"
    return platform.name + (f" with {', '.join(explicit)} as set" if explicit else "")


def _host(value: str) -> str:
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if not re.fullmatch(r"[^\s/\[\]]+", bare):
        raise UserError(
            f"MASTER_ADDR={value} is no host: give the name or address of node 0 alone, for example "
            "MASTER_ADDR=10.0.0.1."
        )
    if bare.count(":") == 1:
        raise UserError(
            f"MASTER_ADDR={value} has a port in it. Give the host alone, for example MASTER_ADDR={bare.split(':')[0]}, "
            "and the port in MASTER_PORT."
        )
    return bare


def _refuse_missing(
    given: Mapping[str, str], explicit: Mapping[str, str], platform: Platform | None, env: Mapping[str, str]
) -> None:
    missing = [name for name in _NAMES if name not in given]
    if not missing:
        return
    name = missing[0]
    what, example = _WHAT[name]
    others = f" (nor {', '.join(missing[1:])})" if missing[1:] else ""
    if platform:
        source = _source(platform, name)
        told = f", nor is {source}" if source != name else ""
        raise UserError(
            f"{name} is not set{others}{told}: {what}, for example {name}={example}. This process was "
            f"started by {platform.name}. {platform.advice} For one node: export WORLD_SIZE=1."
        )
    raise UserError(
        f"{name} is not set{others}: {what}, for example {name}={example}. {', '.join(explicit)} "
        f"{'is' if len(explicit) == 1 else 'are'} set, so several nodes are meant; they need all four, for example "
        f"{_EXAMPLE}{_srun_hint(env)}. For one node unset them: unset {' '.join(explicit)}"
    )


def _srun_hint(env: Mapping[str, str]) -> str:
    if not _get(env, "SLURM_JOB_ID"):
        return ""
    return ", or start it with srun --ntasks-per-node=1, which sets what is needed (a batch script is one process)"


def _refuse_several_per_node(platform: Platform, env: Mapping[str, str]) -> None:
    # Slurm writes 2(x3),1 for 2, 2, 2 and 1.
    counts = [int(count) for count in re.findall(r"(?:^|,)([0-9]+)", _get(env, platform.per_node))]
    if counts and max(counts) > 1:
        raise UserError(
            f"{platform.per_node}={_get(env, platform.per_node)} says that {platform.name} started {max(counts)} "
            f"processes on a node. One process drives all GPUs of a node: start one per node, {platform.one_per_node}. "
            "If this is one process in a shell that was started so: export WORLD_SIZE=1."
        )


def _refuse_gpu_count(env: Mapping[str, str], world_size: int, gpus: int | None) -> None:
    """Many platforms count GPUs in WORLD_SIZE; the start would wait for processes that never come."""
    local_rank = _get(env, "LOCAL_RANK")
    local_size = _get(env, "LOCAL_WORLD_SIZE") or "1"
    if local_rank not in ("", "0") or (local_rank and local_size != "1"):
        raise UserError(
            f"LOCAL_RANK={local_rank} says that a launcher started several processes on this node. One process "
            "drives all GPUs of a node: start one per node (torchrun --nproc-per-node=1, or no torchrun at all)."
        )
    nodes = _num_nodes(env)
    if gpus and gpus > 1 and nodes.isdecimal() and int(nodes) * gpus == world_size:
        raise UserError(
            f"WORLD_SIZE={world_size} counts GPUs here ({nodes} nodes x {_gpus_variable(env)}={gpus}). One process per "
            f"node drives all GPUs of it, so WORLD_SIZE must count nodes: export WORLD_SIZE={nodes}, and RANK must be "
            f"the node's index, 0 to {int(nodes) - 1}."
        )


def _num_nodes(env: Mapping[str, str]) -> str:
    return _get(env, "NNODES") or _get(env, "PET_NNODES") or _get(env, "SLURM_NNODES")


def _gpus_per_node(env: Mapping[str, str]) -> int | None:
    variable = _gpus_variable(env)
    gpus = _get(env, variable)
    if not variable or gpus in _TORCHRUN_WORDS:
        return None
    return _integer(variable, gpus, 1, 1024, "NPROC_PER_NODE")


def _gpus_variable(env: Mapping[str, str]) -> str:
    return next((name for name in ("NPROC_PER_NODE", "PET_NPROC_PER_NODE") if _get(env, name)), "")


def _is_one(value: str | None) -> bool:
    return value is not None and re.fullmatch("0*1", value) is not None


def _get(env: Mapping[str, str], name: str) -> str:
    return env.get(name, "").strip()


def _integer(variable: str, value: str, least: int, most: int, name: str | None = None) -> int:
    """The number in `variable`, which stands for the plain `name`."""
    what, example = _WHAT[name or variable]
    if not re.fullmatch(r"[0-9]{1,9}", value) or not least <= int(value) <= most:
        raise UserError(
            f"{variable}={value} is not right: {what}, a whole number from {least} to {most}, "
            f"for example {variable}={example}."
        )
    return int(value)
