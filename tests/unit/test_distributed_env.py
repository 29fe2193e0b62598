"""The platform's variables: what is read, and what each mistake says."""

import socket

import pytest

from openpi_accel.errors import UserError
from openpi_accel.parallel.distributed import initialize, parse

GOOD = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}


def test_one_node_needs_nothing() -> None:
    assert parse({"PATH": "/bin"}) is None
    assert parse({"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert parse({name: "" for name in GOOD}) is None
    assert initialize({}) is None


def test_two_nodes() -> None:
    cluster = parse(GOOD | {"NPROC_PER_NODE": "8"})
    assert cluster is not None
    assert (cluster.coordinator_address, cluster.num_processes, cluster.process_id) == ("10.0.0.1:29500", 2, 1)
    assert parse(GOOD | {"MASTER_ADDR": "fd00::1"}).coordinator_address == "[fd00::1]:29500"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"])
def test_a_missing_variable_is_named_with_an_example(name: str) -> None:
    env = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(UserError, match=rf"not {name}\..*MASTER_ADDR=10\.0\.0\.1 .*unset"):
        parse(env)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "2"}, "RANK=2 is out of range.* 0 to 1"),
        ({"RANK": "-1"}, "RANK='-1' must be a whole number"),
        ({"RANK": "node0"}, "RANK='node0'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
        ({"MASTER_ADDR": "10.0.0.1:29500"}, "has a port in it"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK=3.*one per node"),
        ({"WORLD_SIZE": "16", "NPROC_PER_NODE": "8", "NNODES": "2"}, "counts GPUs.*export WORLD_SIZE=2"),
    ],
)
def test_a_wrong_value_is_explained(change: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(GOOD | change)


def test_sixteen_nodes_of_eight_gpus_are_no_mistake() -> None:
    assert parse(GOOD | {"WORLD_SIZE": "16", "NPROC_PER_NODE": "8", "NNODES": "16"}) is not None
    assert parse(GOOD | {"WORLD_SIZE": "16", "NPROC_PER_NODE": "auto"}) is not None


def test_a_start_without_the_others_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        env = GOOD | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}

    def refuse(**kwargs: object) -> None:
        assert kwargs == {
            "coordinator_address": f"127.0.0.1:{env['MASTER_PORT']}",
            "num_processes": 2,
            "process_id": 1,
            "initialization_timeout": 7,
        }
        raise RuntimeError("DEADLINE_EXCEEDED")

    monkeypatch.setattr("jax.distributed.initialize", refuse)
    with pytest.raises(UserError, match="Rank 1 could not start .* within 7 s.*counts nodes, not GPUs.*DEADLINE"):
        initialize(env, timeout_s=7)
