"""The parity of whole training steps: losses, norms, parameters and their average, with upstream's random streams."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from openpi_accel.config.schema import Architecture, OptimizerConfig, ScheduleConfig
from openpi_accel.errors import UserError
from openpi_accel.models.freeze import trainable_predicate
from openpi_accel.models.ops import Ops
from openpi_accel.tools.golden import Golden
from openpi_accel.tools.parity_programs import train_programs
from openpi_accel.train.optimizer import make_schedule
from openpi_accel.tree import flatten
from openpi_accel.types import Batch

_SERIES = {"loss": "mean_loss", "grad_norm": "train", "param_norm": "train"}
# By so much of a leaf's largest entry do upstream's own gradients differ between two releases of jax
# (goldens/README.md).
_GRADIENT_NOISE = 7e-6

Comparison = tuple[str, np.ndarray, np.ndarray, str, np.ndarray | float]


def train_leaves(golden: Golden, arch: Architecture, ops: Ops) -> Iterator[Comparison]:
    """Repeats the golden's training steps on its one batch: (name, ours, golden, kind of tolerance, slack).

    The slack of a parameter is what `_first_update_slack` allows; elsewhere it is 0.

    Raises:
        UserError: no schedule, or leaves that the model does not have.
    """
    params = golden.params()
    is_trainable = trainable_predicate("auto", params, arch)
    if "trainable" in golden:
        theirs = {str(path) for path in golden["trainable"]}
        paths = sorted(theirs | set(flatten(params)))
        ours = np.array([path in flatten(params) and is_trainable(path) for path in paths])
        yield "trainable", ours, np.array([path in theirs for path in paths]), "exact", 0.0

    series = {name: golden[f"train/{name}"] for name in _SERIES if f"train/{name}" in golden}
    finals = {name: golden.under(f"train/{name}") for name in ("params", "ema")}
    if not series:
        return
    num_steps = {array.shape for array in series.values()}
    if len(num_steps) != 1 or len(next(iter(num_steps))) != 1:
        raise UserError(
            f"{golden.name}: the series below train/ have the shapes {sorted(num_steps)}; expected one length."
        )

    metrics, state, slack = _run(golden, arch, ops, next(iter(num_steps))[0])
    for name, values in series.items():
        # Each step is a leaf of its own, so that no step hides behind a larger one.
        for i, value in enumerate(values):
            yield f"train/{name}[{i}]", np.asarray(metrics[i][name]), np.asarray(value), _SERIES[name], 0.0
    for name, tree in (("params", state.params), ("ema", state.ema_params)):
        found = flatten(tree) if tree is not None else {}
        for path, value in finals[name].items():
            if path not in found or found[path].shape != value.shape:
                raise UserError(f"{golden.name}: train/{name}/{path} {value.shape} is no leaf of the trained model.")
            yield f"train/{name}/{path}", np.asarray(found[path], np.float32), value, "train", slack.get(path, 0.0)


def _run(
    golden: Golden, arch: Architecture, ops: Ops, num_steps: int
) -> tuple[list[dict[str, jax.Array]], Any, dict[str, np.ndarray]]:
    warmup, peak, decay_steps, decay_lr = (float(x) for x in golden["meta/schedule"])
    schedule = ScheduleConfig(warmup_steps=int(warmup), peak_lr=peak, decay_steps=int(decay_steps), decay_lr=decay_lr)
    optimizer = OptimizerConfig(clip_gradient_norm=float(golden.meta("clip", 1.0)))
    decay = float(golden.meta("ema_decay", math.nan))
    ema_decay = None if math.isnan(decay) else decay
    seed = int(golden.meta("seed_train", 42))
    rng = golden.key("train/rng_key_data") if "train/rng_key_data" in golden else jax.random.key(seed)

    start, step = train_programs(arch, ops, schedule, optimizer, ema_decay)
    state = start(golden.params())
    batch = Batch(observation=golden.observation(), actions=jnp.asarray(golden["actions"]))
    metrics = []
    slack: dict[str, np.ndarray] = {}
    for _ in range(num_steps):
        state, values = step(state, batch, rng)
        metrics.append(values)
        if arch.dtype == "float32" and not slack:  # bfloat16's tolerances are wide enough
            # After one step Adam's first moment is (1 - b1) times the gradient, clipped already.
            moment = optax.tree_utils.tree_get(state.opt_state, "mu")
            clipped = {path: np.asarray(m, np.float64) / (1 - optimizer.b1) for path, m in flatten(moment).items()}
            slack = _first_update_slack(clipped, float(make_schedule(schedule)(0)), optimizer.eps)
    return metrics, state, slack


def _first_update_slack(grads: Mapping[str, np.ndarray], learning_rate: float, eps: float) -> dict[str, np.ndarray]:
    """By how much the rounding of gradients may move each parameter in the first update.

    Adam's first update is learning_rate * g / (|g| + eps). Where |g| is as small as eps (about one entry in a hundred),
    a change of g that is a millionth of its neighbours moves the update by a per cent: there the compiler decides on
    the fifth digit. Under the jax 0.5.3 that made the goldens, all entries agree to the last bit.
    """

    def update(g: np.ndarray) -> np.ndarray:
        return learning_rate * g / (np.abs(g) + eps)

    slack = {}
    for path, grad in grads.items():
        g = np.abs(grad)
        noise = _GRADIENT_NOISE * g.max()
        largest = np.maximum(update(g + noise) - update(g), update(g) - update(g - noise))
        slack[path] = np.where(g > 0, largest, 0.0)  # exactly 0: nothing was summed, so nothing rounded
    return slack
