"""The parity of whole training steps: losses, norms, parameters and their average, with upstream's random streams."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from openpi_accel.config.schema import Architecture, OptimizerConfig, ScheduleConfig
from openpi_accel.data.augment import augment
from openpi_accel.errors import UserError
from openpi_accel.models.freeze import trainable_predicate
from openpi_accel.models.pi0 import Pi0
from openpi_accel.objective import make_loss_fn
from openpi_accel.tools.golden import Golden
from openpi_accel.train.optimizer import make_optimizer, make_schedule
from openpi_accel.train.step import init_state, make_train_step
from openpi_accel.tree import flatten
from openpi_accel.types import Batch, Params

_SERIES = {"loss": "mean_loss", "grad_norm": "train", "param_norm": "train"}


def train_leaves(
    golden: Golden, arch: Architecture, bind: Callable[[Params], Pi0]
) -> Iterator[tuple[str, np.ndarray, np.ndarray, str]]:
    """Repeats the golden's training steps on its one batch: (name, ours, golden, kind of tolerance).

    Raises:
        UserError: no schedule, or leaves that the model does not have.
    """
    params = golden.params()
    is_trainable = trainable_predicate("auto", params, arch)
    if "trainable" in golden:
        theirs = {str(path) for path in golden["trainable"]}
        paths = sorted(theirs | set(flatten(params)))
        ours = np.array([path in flatten(params) and is_trainable(path) for path in paths])
        yield "trainable", ours, np.array([path in theirs for path in paths]), "exact"

    series = {name: golden[f"train/{name}"] for name in _SERIES if f"train/{name}" in golden}
    finals = {name: golden.under(f"train/{name}") for name in ("params", "ema")}
    if not series:
        return
    num_steps = {array.shape for array in series.values()}
    if len(num_steps) != 1 or len(next(iter(num_steps))) != 1:
        raise UserError(
            f"{golden.name}: the series below train/ have the shapes {sorted(num_steps)}; expected one length."
        )

    states = _run(golden, bind, params, is_trainable, next(iter(num_steps))[0])
    metrics, state = states
    for name, values in series.items():
        # Each step is a leaf of its own, so that no step hides behind a larger one.
        for i, value in enumerate(values):
            yield f"train/{name}[{i}]", np.asarray(metrics[i][name]), np.asarray(value), _SERIES[name]
    for name, tree in (("params", state.params), ("ema", state.ema_params)):
        found = flatten(tree) if tree is not None else {}
        for path, value in finals[name].items():
            if path not in found or found[path].shape != value.shape:
                raise UserError(f"{golden.name}: train/{name}/{path} {value.shape} is no leaf of the trained model.")
            yield f"train/{name}/{path}", np.asarray(found[path], np.float32), value, "train"


def _run(
    golden: Golden, bind: Callable[[Params], Pi0], params: Params, is_trainable: Callable[[str], bool], num_steps: int
) -> tuple[list[dict[str, jax.Array]], Any]:
    warmup, peak, decay_steps, decay_lr = (float(x) for x in golden["meta/schedule"])
    schedule = make_schedule(
        ScheduleConfig(warmup_steps=int(warmup), peak_lr=peak, decay_steps=int(decay_steps), decay_lr=decay_lr)
    )
    tx = make_optimizer(OptimizerConfig(clip_gradient_norm=float(golden.meta("clip", 1.0))), schedule)
    decay = float(golden.meta("ema_decay", math.nan))
    ema_decay = None if math.isnan(decay) else decay
    seed = int(golden.meta("seed_train", 42))
    rng = golden.key("train/rng_key_data") if "train/rng_key_data" in golden else jax.random.key(seed)

    step = jax.jit(make_train_step(make_loss_fn(bind, augment), tx, schedule, is_trainable, ema_decay))
    state = init_state(params, tx, is_trainable, ema_decay)
    batch = Batch(observation=golden.observation(), actions=jnp.asarray(golden["actions"]))
    metrics = []
    for _ in range(num_steps):
        state, values = step(state, batch, rng)
        metrics.append(values)
    return metrics, state
