"""Step time, efficiency and memory on many GPUs, from one GPU's measured step and what the sharded step sends."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from openpi_accel.build.training import build_training
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig
from openpi_accel.errors import UserError
from openpi_accel.parallel.mesh import BATCH_AXIS, FSDP_AXIS
from openpi_accel.parallel.sharding import state_shardings
from openpi_accel.tools.scaling.network import Links, Members, collective_s
from openpi_accel.tools.scaling.traffic import Group, step_transfers
from openpi_accel.types import TrainState

# Optimizer, average and norms over all parameters on one H200 (docs/performance.md); sharded, each GPU does its part.
UPDATE_MS = 37.3
# Of a step's computation; the rest is the forward pass, of which nothing is reduced.
_BACKWARD_SHARE = 2 / 3
Overlap = Literal["none", "backward"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneGpu:
    """A measured step on one GPU.

    Attributes:
        batch_size: samples of it.
        step_ms: its time.
        peak_gib: its memory.
    """

    batch_size: int
    step_ms: float
    peak_gib: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the prediction rests on beside the measured step.

    Attributes:
        links: rates.
        layer_itemsize: bytes per number of a layer's gathered parameters and of gradients, see `step_transfers`.
        vision_passes: runs of the vision tower per step.
        overlap: none: the GPU waits for every byte. backward: sums of gradients and gathers run while the backward pass
            computes, as far as it lasts, and gathers of the forward pass while that computes.
    """

    links: Links
    layer_itemsize: int
    vision_passes: int
    overlap: Overlap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """One arrangement.

    Attributes:
        num_nodes, num_gpus, fsdp_devices: the arrangement.
        step_ms: predicted.
        exposed_ms: of it, waiting for other GPUs.
        samples_per_s: of all GPUs.
        efficiency: samples per second and GPU over those of one GPU.
        weak_scaling: the same over those of one node (of as many as a group fills, where that is more).
        sent_gb: by each GPU in a step, 10^9 bytes, as rings send.
        state_gib, gradients_gib, activations_gib, memory_gib: of each GPU; the last is the sum.
    """

    num_nodes: int
    num_gpus: int
    fsdp_devices: int
    step_ms: float
    exposed_ms: float
    samples_per_s: float
    efficiency: float
    weak_scaling: float
    sent_gb: float
    state_gib: float
    gradients_gib: float
    activations_gib: float
    memory_gib: float


def _mesh(num_gpus: int, fsdp_devices: int) -> AbstractMesh:
    """Any number of devices, which need not be there."""
    return AbstractMesh((num_gpus // fsdp_devices, fsdp_devices), (BATCH_AXIS, FSDP_AXIS), (AxisType.Auto,) * 2)


def _placed(shapes: TrainState, mesh: AbstractMesh) -> TrainState:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, mesh),
    )


def predict(
    config: TrainConfig,
    one: OneGpu,
    assumptions: Assumptions,
    *,
    nodes: Sequence[int],
    gpus_per_node: int,
    fsdp_devices: int,
) -> list[Prediction]:
    """A prediction for each number of nodes.

    Args:
        config: with a fixed prompt length.
        one: the same step on one GPU, with the batch that each GPU will have.

    Raises:
        UserError: fsdp_devices does not fit the nodes.
    """
    whole = build_training(config, Acceleration(), _mesh(1, 1)).abstract
    activations_gib = one.peak_gib - _gib(whole) - _gib(whole.params)
    rows = [
        _predict(config, whole, one, assumptions, number, gpus_per_node, fsdp_devices, activations_gib)
        for number in (1 if fsdp_devices <= gpus_per_node else fsdp_devices // gpus_per_node, *nodes)
    ]
    return [dataclasses.replace(row, weak_scaling=row.efficiency / rows[0].efficiency) for row in rows[1:]]


def _predict(
    config: TrainConfig,
    whole: TrainState,
    one: OneGpu,
    a: Assumptions,
    nodes: int,
    gpus_per_node: int,
    fsdp: int,
    activations_gib: float,
) -> Prediction:
    gpus = nodes * gpus_per_node
    if gpus % fsdp or (gpus_per_node % fsdp and fsdp % gpus_per_node):
        raise UserError(
            f"--fsdp-devices {fsdp} does not fit {nodes} nodes of {gpus_per_node} GPUs: groups of GPUs that share "
            "parameters must lie within a node or fill whole ones."
        )
    state = _placed(whole, _mesh(gpus, fsdp))
    assert isinstance(config.model.max_token_len, int), "the prompt length is fixed"
    transfers = step_transfers(
        state.params,
        layer_itemsize=a.layer_itemsize,
        vision_passes=a.vision_passes,
        num_tokens=fsdp * one.batch_size * config.model.max_token_len,
    )
    fsdp_nodes = max(1, fsdp // gpus_per_node)
    members: dict[Group, Members] = {
        "fsdp": Members(num_devices=fsdp, num_nodes=fsdp_nodes),
        "batch": Members(num_devices=gpus // fsdp, num_nodes=nodes // fsdp_nodes),
        "all": Members(num_devices=gpus, num_nodes=nodes),
    }
    forward_s = backward_s = sent = 0.0
    for t in transfers:
        seconds = collective_s(t.kind, t.num_bytes, t.num_calls, members[t.group], a.links)
        others = (members[t.group].num_devices - 1) / members[t.group].num_devices
        sent += t.num_bytes * others * (2 if t.kind == "all-reduce" else 1)
        forward_s += seconds / 2 if t.kind == "all-gather" else 0.0
        backward_s += seconds / 2 if t.kind == "all-gather" else seconds
    update_ms = UPDATE_MS / fsdp
    compute_ms = one.step_ms - UPDATE_MS
    waits = [1e3 * forward_s, 1e3 * backward_s]
    if a.overlap == "backward":
        waits[0] = max(0.0, waits[0] - (1 - _BACKWARD_SHARE) * compute_ms)
        waits[1] = max(0.0, waits[1] - _BACKWARD_SHARE * compute_ms)
    step_ms = compute_ms + update_ms + sum(waits)
    state_gib = _gib(state)
    gradients_gib = _gib(state.params)
    efficiency = one.step_ms / step_ms
    return Prediction(
        num_nodes=nodes,
        num_gpus=gpus,
        fsdp_devices=fsdp,
        step_ms=step_ms,
        exposed_ms=sum(waits),
        samples_per_s=gpus * one.batch_size / step_ms * 1e3,
        efficiency=efficiency,
        weak_scaling=efficiency,
        sent_gb=sent / 1e9,
        state_gib=state_gib,
        gradients_gib=gradients_gib,
        activations_gib=activations_gib,
        memory_gib=state_gib + gradients_gib + activations_gib,
    )


def _gib(shapes: Any) -> float:
    return (
        sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
            for leaf in jax.tree.leaves(shapes)
        )
        / 2**30
    )
