"""Several nodes: from the platform's variables to jax.distributed. One process per node, with all GPUs of the node."""

import dataclasses
from collections.abc import Mapping

import jax

from openpi_accel.errors import UserError

_NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_EXAMPLE = "for example MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 RANK=0 WORLD_SIZE=2"
START_TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where the coordinator listens, and which of how many processes this is."""

    coordinator_address: str
    num_processes: int
    process_id: int


def parse(env: Mapping[str, str]) -> Cluster | None:
    """Reads MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; pure. None means one node.

    Raises:
        UserError: a variable is missing or wrong, or WORLD_SIZE counts GPUs.
    """
    given = {name: env[name].strip() for name in _NAMES if env.get(name, "").strip()}
    if not given:
        return None
    if "WORLD_SIZE" in given and _integer(given, "WORLD_SIZE", minimum=1) == 1:
        return None
    missing = [name for name in _NAMES if name not in given]
    if missing:
        raise UserError(
            f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} set, but not {', '.join(missing)}. Several nodes "
            f"need all four, {_EXAMPLE}; for one node unset them: unset {' '.join(given)}"
        )
    world_size = _integer(given, "WORLD_SIZE", minimum=1)
    _refuse_gpu_count(env, world_size)
    rank = _integer(given, "RANK", minimum=0)
    if rank >= world_size:
        raise UserError(
            f"RANK={rank} is out of range: with WORLD_SIZE={world_size} nodes it must be 0 to {world_size - 1}, "
            "a different one on each node."
        )
    port = _integer(given, "MASTER_PORT", minimum=1)
    if port > 65535:
        raise UserError(f"MASTER_PORT={port} is no port; choose a free one from 1024 to 65535, the same on all nodes.")
    address = given["MASTER_ADDR"]
    if ":" in address and not address.startswith("["):
        if address.count(":") == 1:
            raise UserError(
                f"MASTER_ADDR={address} has a port in it. Give the host alone in MASTER_ADDR, the port in MASTER_PORT."
            )
        address = f"[{address}]"  # IPv6
    return Cluster(coordinator_address=f"{address}:{port}", num_processes=world_size, process_id=rank)


def initialize(env: Mapping[str, str], timeout_s: int = START_TIMEOUT_S) -> Cluster | None:
    """Joins the cluster that `env` describes, before JAX touches a device; does nothing for one node.

    Raises:
        UserError: as `parse`, or not all processes came together in `timeout_s` seconds.
    """
    cluster = parse(env)
    if cluster is None:
        return None
    try:
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator_address,
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            initialization_timeout=timeout_s,
        )
    except Exception as error:  # JAX raises RuntimeError, ValueError and its own runtime's errors here
        raise UserError(
            f"Rank {cluster.process_id} could not start with the other {cluster.num_processes - 1} processes at "
            f"{cluster.coordinator_address} within {timeout_s} s. Check that every node runs the same command with its "
            "own RANK, that MASTER_ADDR is the address of the node with RANK=0 and its MASTER_PORT is reachable, and "
            f"that WORLD_SIZE={cluster.num_processes} counts nodes, not GPUs. JAX says: {str(error)[:500]}"
        ) from error
    return cluster


def _refuse_gpu_count(env: Mapping[str, str], world_size: int) -> None:
    """Many platforms count GPUs in WORLD_SIZE; the start would wait for processes that never come."""
    if env.get("LOCAL_RANK", "0").strip() not in ("0", ""):
        raise UserError(
            f"LOCAL_RANK={env['LOCAL_RANK']} says that a launcher started several processes on this node. One process "
            "drives all GPUs of a node: start one per node (torchrun --nproc-per-node=1, or no torchrun at all)."
        )
    gpus = env.get("NPROC_PER_NODE", "").strip()  # "auto" and the like say nothing
    nodes = (env.get("NNODES") or env.get("PET_NNODES") or env.get("SLURM_NNODES") or "").strip()
    if gpus.isdigit() and int(gpus) > 1 and nodes.isdigit() and int(nodes) * int(gpus) == world_size:
        raise UserError(
            f"WORLD_SIZE={world_size} counts GPUs here ({nodes} nodes x NPROC_PER_NODE={gpus}). One process per node "
            f"drives all GPUs of it, so WORLD_SIZE must count nodes: export WORLD_SIZE={nodes}, and RANK must be the "
            f"node's index, 0 to {int(nodes) - 1}."
        )


def _integer(given: Mapping[str, str], name: str, minimum: int) -> int:
    value = given[name]
    if not value.isdigit() or int(value) < minimum:
        raise UserError(f"{name}={value!r} must be a whole number of at least {minimum}; {_EXAMPLE}.")
    return int(value)
