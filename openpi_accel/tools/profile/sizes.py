"""Bytes: what a device holds, and what a step moves."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from openpi_accel import tree
from openpi_accel.build.training import Training
from openpi_accel.parallel.collectives import read_collectives
from openpi_accel.train.memory import step_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device, by kind; temporaries is the compiler's account of what lives within a step, None where it
    gives none."""

    parameters: int
    optimizer: int
    average: int
    batch: int
    temporaries: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one step moves.

    Attributes:
        host_to_device: the batch, of this process.
        state_read, state_written: parameters, optimizer state and average, once each, on one device; frozen leaves are
            read alone. Activations and the reading of parameters by the layers are not counted.
        collectives: kind -> what one device sends, as a ring does it; None where the program's text could not be read.
    """

    host_to_device: int
    state_read: int
    state_written: int
    collectives: Mapping[str, float] | None


def memory_by_kind(training: Training, batch: Any, step: jax.stages.Compiled) -> Memory:
    """From shapes, shardings and the compiled step."""
    need, abstract = step_memory(step), training.abstract
    return Memory(
        parameters=device_bytes(abstract.params),
        optimizer=device_bytes(abstract.opt_state),
        average=device_bytes(abstract.ema_params),
        batch=device_bytes(batch),
        temporaries=None if need is None else need.temporaries,
    )


def traffic(training: Training, host_batch: Any, step: jax.stages.Compiled) -> Traffic:
    """From shapes, shardings and the compiled step."""
    abstract = training.abstract
    updated = device_bytes(tree.split(abstract.params, training.is_trainable)[0]) + device_bytes(abstract.opt_state)
    if abstract.ema_params is not None:
        updated += device_bytes(tree.split(abstract.ema_params, training.is_trainable)[0])
    return Traffic(
        host_to_device=sum(leaf.nbytes for leaf in jax.tree.leaves(host_batch)),
        state_read=device_bytes(abstract.params) + updated - device_bytes(_trainable(training)),
        state_written=updated,
        collectives=_sent(step),
    )


def device_bytes(arrays: Any) -> int:
    """Of one device's shards of arrays or shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays)
    )


def _trainable(training: Training) -> Any:
    return tree.split(training.abstract.params, training.is_trainable)[0]


def _sent(step: jax.stages.Compiled) -> dict[str, float] | None:
    text = step.as_text()
    if text is None:
        return None
    try:
        collectives = read_collectives(text)
    except ValueError:
        return None
    sent: Counter[str] = Counter()
    for collective in collectives:
        sent[collective.kind] += collective.sent_bytes  # type: ignore[assignment]
    return dict(sent)
