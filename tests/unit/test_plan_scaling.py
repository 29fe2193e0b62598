"""The planner: what must hold whatever the constants are, and that docs/scaling.md shows what it prints."""

import dataclasses
import json
import re
import shlex

import pytest

from openpi_accel.config.presets import get_preset
from openpi_accel.errors import UserError
from openpi_accel.tools.scaling import command
from openpi_accel.tools.scaling.network import Links, Members, collective_s
from openpi_accel.tools.scaling.plan import Assumptions, OneGpu, Prediction, predict
from tests.conftest import REPO

DOCS = REPO / "docs" / "scaling.md"
ONE = OneGpu(batch_size=32, step_ms=665.4, peak_gib=65.8)
LINKS = Links(nvlink_gb_s=450, network_gb_s=50)
ASSUMED = Assumptions(links=LINKS, layer_itemsize=2, vision_passes=1, overlap="none")


def plan(assumed: Assumptions = ASSUMED, *, gpus: int = 8, fsdp: int = 1, nodes: tuple[int, ...] = (2,)) -> Prediction:
    config = get_preset("pi05_libero")
    return predict(config, ONE, assumed, nodes=nodes, gpus_per_node=gpus, fsdp_devices=fsdp)[-1]


def test_one_gpu_is_what_was_measured() -> None:
    alone = plan(gpus=1, nodes=(1,))
    assert (alone.step_ms, alone.efficiency, alone.weak_scaling) == (pytest.approx(665.4), 1.0, 1.0)
    assert alone.exposed_ms == alone.sent_gb == 0
    assert alone.memory_gib == pytest.approx(65.8)
    assert alone.samples_per_s == pytest.approx(32 / 0.6654)


def test_more_nodes_cost_and_more_link_helps() -> None:
    config = get_preset("pi05_libero")
    for fsdp in (1, 8):
        nodes = (1, 2, 4, 32)
        rows = predict(config, ONE, ASSUMED, nodes=nodes, gpus_per_node=8, fsdp_devices=fsdp)
        steps = [row.step_ms for row in rows]
        assert steps == sorted(steps) and len(set(steps)) == 4 and rows[0].weak_scaling == 1
        assert [row.samples_per_s for row in rows] == sorted(row.samples_per_s for row in rows)
        faster = Links(nvlink_gb_s=450, network_gb_s=100)
        assert plan(dataclasses.replace(ASSUMED, links=faster), fsdp=fsdp).step_ms < steps[1]
    assert plan(dataclasses.replace(ASSUMED, layer_itemsize=4)).sent_gb > 1.5 * plan().sent_gb
    assert plan(dataclasses.replace(ASSUMED, overlap="backward")).step_ms < plan().step_ms


def test_memory_falls_with_sharding() -> None:
    whole, quarter, eighth = (plan(fsdp=fsdp) for fsdp in (1, 4, 8))
    assert whole.state_gib == pytest.approx(4 * whole.gradients_gib, rel=1e-6)
    assert quarter.state_gib == pytest.approx(whole.state_gib / 4, rel=0.01)
    assert eighth.state_gib == pytest.approx(whole.state_gib / 8, rel=0.01)
    assert whole.activations_gib == eighth.activations_gib > 0


def test_only_shards_cross_nodes() -> None:
    """A hybrid run is hurt less by a slow network than one whose gathers cross it."""
    slow = dataclasses.replace(ASSUMED, links=Links(nvlink_gb_s=450, network_gb_s=5))
    assert plan(slow, fsdp=8).exposed_ms < 0.7 * plan(slow, fsdp=16).exposed_ms


def test_a_ring_by_hand() -> None:
    """Two GPUs of a node: one hop each way, half of the bytes each way."""
    two = Members(num_devices=2, num_nodes=1)
    assert collective_s("all-gather", 9e9, 1, two, LINKS) == pytest.approx(0.01 + 11.8e-6)
    assert collective_s("all-reduce", 9e9, 1, two, LINKS) == pytest.approx(0.02 + 15.2e-6)
    assert collective_s("all-reduce", 9e9, 1, Members(num_devices=1, num_nodes=1), LINKS) == 0
    # Two nodes of one GPU: the network alone.
    apart = Members(num_devices=2, num_nodes=2)
    assert collective_s("reduce-scatter", 1e9, 1, apart, LINKS) == pytest.approx(0.01 + (8.4 + 14) * 1e-6)


def test_groups_that_straddle_nodes_are_refused() -> None:
    with pytest.raises(UserError, match="--fsdp-devices 16 does not fit 3 nodes of 8 GPUs"):
        plan(fsdp=16, nodes=(3,))
    with pytest.raises(UserError, match="belong together"):
        command.main(["--step-ms", "700"])
    with pytest.raises(UserError, match="no config named"):
        command.main(["pi06"])


def test_json_holds_what_the_table_holds(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--batch-per-gpu 16 --step-ms 400 --peak-gib 80 --nodes 2 --fsdp-devices 4"
    command.main([*options.split(), "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["one_gpu"] == {"batch_size": 16, "step_ms": 400, "peak_gib": 80}
    (row,) = content["predictions"]
    command.main(options.split())
    assert f"| {row['step_ms']:.1f} | {row['exposed_ms']:.1f} |" in capsys.readouterr().out


@pytest.mark.parametrize("line", re.findall(r"^<!-- plan_scaling(.*) -->$", DOCS.read_text(), re.MULTILINE))
def test_the_docs_show_what_is_printed(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """After a change that is meant: python -m tests.unit.test_plan_scaling"""
    command.main(shlex.split(line))
    assert f"<!-- plan_scaling{line} -->\n\n{table(capsys.readouterr().out)}\n\n" in DOCS.read_text()


def table(output: str) -> str:
    return "\n".join(line for line in output.splitlines() if line.startswith("|"))


def write_docs() -> None:
    """Prints the tables of docs/scaling.md into it anew."""
    import contextlib
    import io

    def renew(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            command.main(shlex.split(match[1]))
        return f"<!-- plan_scaling{match[1]} -->\n\n{table(printed.getvalue())}\n\n"

    DOCS.write_text(re.sub(r"<!-- plan_scaling(.*?) -->\n\n(?:\|.*\n)*\n*", renew, DOCS.read_text()))


if __name__ == "__main__":
    write_docs()
