"""How jax.distributed is started: with which times, and what is said."""

import jax
import pytest

from openpi_accel.errors import UserError
from openpi_accel.parallel import distributed
from openpi_accel.parallel.distributed import initialize, network_settings

NODE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What JAX was started with; all processes are there at once."""
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(distributed, "roll_call", lambda cluster, timeout_s, say: calls.append({"waits_s": timeout_s}))
    monkeypatch.setattr(distributed, "await_coordinator", lambda cluster: calls.append({"awaits": cluster.port}))
    monkeypatch.setattr("jax.distributed.initialize", lambda **kwargs: calls.append(kwargs))
    return calls


def test_one_node_starts_nothing(started: list[dict[str, object]]) -> None:
    said: list[str] = []
    assert initialize({"NCCL_DEBUG": "INFO"}, say=said.append) is None
    assert started == [] and said == ["network settings: NCCL_DEBUG=INFO"]


def test_jax_is_told_everything(started: list[dict[str, object]]) -> None:
    said: list[str] = []
    initialize(NODE | {"NCCL_DEBUG": "INFO"}, timeout_s=7, say=said.append)
    assert started == [
        {"waits_s": 7},
        {"awaits": 29500},
        {
            "coordinator_address": "10.0.0.1:29500",
            "num_processes": 2,
            "process_id": 1,
            "cluster_detection_method": "deactivate",
            "initialization_timeout": 45,
            "heartbeat_timeout_seconds": 30,
            "shutdown_timeout_seconds": 60,
        },
    ]
    assert len(said) == 1 and said[0].startswith("started by the variables MASTER_ADDR") and "node 1 of 2" in said[0]


def test_process_0_tells_the_network_settings(started: list[dict[str, object]]) -> None:
    said: list[str] = []
    initialize(NODE | {"RANK": "0", "NCCL_DEBUG": "INFO"}, say=said.append)
    assert len(started) == 2  # its own coordinator it need not await
    assert said[0] == "network settings: NCCL_DEBUG=INFO" and len(said) == 2


def test_network_settings_are_those_of_nccl_and_infiniband() -> None:
    env = {"NCCL_SOCKET_IFNAME": "eth1", "MELLANOX_IB_X": "1", "PATH": "/bin", "MY_NCCL": "1", "NCCL_DEBUG": "WARN"}
    assert network_settings(env) == "MELLANOX_IB_X=1 NCCL_DEBUG=WARN NCCL_SOCKET_IFNAME=eth1"
    assert network_settings({"PATH": "/bin"}) == ""


def test_a_start_that_jax_refuses_explains_itself(
    started: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**kwargs: object) -> None:
        raise RuntimeError("DEADLINE_EXCEEDED")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(UserError, match=r"Rank 1 could not start JAX .* 10\.0\.0\.1:29500.*http_proxy.*DEADLINE"):
        initialize(NODE, say=lambda line: None)
