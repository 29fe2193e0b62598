"""Several nodes: from the platform's variables to jax.distributed. One process per node, with all GPUs of the node."""

import contextlib
import re
from collections.abc import Callable, Mapping

import jax

from openpi_accel.errors import UserError
from openpi_accel.parallel.platforms import Cluster, parse
from openpi_accel.parallel.roll_call import await_coordinator, roll_call

# Pods may still be pulling their image; process 0 says meanwhile whom it waits for.
START_TIMEOUT_S = 600
# One that cannot start tries so long to say so; the others may be a little behind.
TELL_TIMEOUT_S = 60
# After the roll call all are there, and JAX needs a moment.
_JOIN_TIMEOUT_S = 45
# A process that was killed is missed after this time, and the others are ended. JAX's default is 100.
HEARTBEAT_TIMEOUT_S = 30
# A process that has finished waits so long for the others to finish too; after that all are ended. Process 0 has
# a loss curve to draw and its writers to close, so not much less. JAX's default is 300.
SHUTDOWN_TIMEOUT_S = 60

_NETWORK_NAME = re.compile(r"NCCL_|.*_IB_")


def _print_now(line: str) -> None:
    print(line, flush=True)  # a platform's log is a pipe, and the wait may be long


def initialize(
    env: Mapping[str, str],
    timeout_s: int = START_TIMEOUT_S,
    heartbeat_timeout_s: int = HEARTBEAT_TIMEOUT_S,
    shutdown_timeout_s: int = SHUTDOWN_TIMEOUT_S,
    say: Callable[[str], object] = _print_now,
) -> Cluster | None:
    """Joins the cluster that `env` describes, before JAX touches a device; does nothing for one node.

    Args:
        say: told what was recognised, and by process 0 which settings of the network are in force.

    Raises:
        UserError: as `parse`, or not all processes came together in `timeout_s` seconds.
    """
    cluster = parse(env)
    if (cluster is None or cluster.process_id == 0) and (settings := network_settings(env)):
        say(f"network settings: {settings}")
    if cluster is None:
        return None
    say(cluster.describe())
    roll_call(cluster, timeout_s, say)
    if cluster.process_id != 0:
        await_coordinator(cluster)
    try:
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator_address,
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            # Else JAX recognises Slurm or Open MPI by itself, and gives the process one GPU of the node.
            cluster_detection_method="deactivate",
            initialization_timeout=_JOIN_TIMEOUT_S,
            heartbeat_timeout_seconds=heartbeat_timeout_s,
            shutdown_timeout_seconds=shutdown_timeout_s,
        )
    except Exception as error:  # JAX raises RuntimeError, ValueError and its own runtime's errors here
        raise UserError(
            f"Rank {cluster.process_id} could not start JAX with the other {cluster.num_processes - 1} processes at "
            f"{cluster.coordinator_address}, though all were there. If a proxy is set (http_proxy, https_proxy), unset "
            f"it or put node 0 into no_proxy. JAX says: {str(error)[:500]}"
        ) from error
    return cluster


def tell_others(
    env: Mapping[str, str],
    trouble: str,
    timeout_s: float = TELL_TIMEOUT_S,
    say: Callable[[str], object] = _print_now,
) -> None:
    """Lets the other nodes know why this one will not start; else they would wait for it. Nothing on one node.

    Args:
        trouble: the reason, for people.
        timeout_s: how long to try to reach node 0, or on node 0 to be reached.
    """
    try:
        cluster = parse(env)
    except UserError:  # who the others are cannot be told; that is the message of this node then
        return
    if cluster is not None:
        say("this node cannot start; telling the others")
        with contextlib.suppress(UserError):  # each of the others shows it; this one has its own message
            roll_call(cluster, timeout_s, lambda line: None, trouble=trouble)


def network_settings(env: Mapping[str, str]) -> str:
    """NCCL_* and *_IB_* variables that are set, in one line. Nothing is set here: NCCL finds interfaces by itself."""
    return " ".join(f"{name}={env[name]}" for name in sorted(env) if _NETWORK_NAME.match(name))
