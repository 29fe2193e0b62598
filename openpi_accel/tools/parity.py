"""Compares this model with upstream's own numbers, group by group and leaf by leaf.

Shape letters: B batch, T tokens, P prefix tokens, A action horizon, E action dim.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from openpi_accel.config.schema import Architecture
from openpi_accel.data.augment import to_float
from openpi_accel.errors import UserError
from openpi_accel.models.ops import REFERENCE_OPS, Ops
from openpi_accel.models.pi0 import Forward
from openpi_accel.objective import draw_noise_time
from openpi_accel.tools.golden import Golden, architecture_of
from openpi_accel.tools.parity_programs import augmented, model_programs
from openpi_accel.tools.parity_train import train_leaves
from openpi_accel.tree import flatten
from openpi_accel.types import Params

# Largest error per leaf (goldens/README.md). `exact` is for masks and positions, `drawn` for random numbers.
TOLERANCES: dict[str, dict[str, float]] = {
    "float32": {"forward": 1e-5, "grads": 3e-5, "train": 1e-5, "loss": 1e-5, "mean_loss": 1e-5},
    "bfloat16": {"forward": 3e-2, "grads": 5e-2, "train": 2e-2, "loss": 5e-3, "mean_loss": 1e-3},
}
for _table in TOLERANCES.values():
    _table |= {"exact": 0.0, "drawn": 1e-6, "augmented": 6e-4}

# Below this everywhere, a golden leaf is zero up to rounding and is compared absolutely.
ZERO = 1e-8
# The softmax does not feel a shift of all keys, so this gradient is rounding noise.
KEY_BIAS, KEY_BIAS_BF16_TOLERANCE = "MultiHeadDotProductAttention_0/key/bias", 2e-5


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One comparison: what we compute, what upstream computed, which tolerance holds, and what entries may differ by
    besides (parity_train)."""

    name: str
    ours: np.ndarray
    golden: np.ndarray
    kind: str
    slack: np.ndarray | float = 0.0


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """The worst leaf of a group. `status` is ok, out of tolerance, or absent (the golden lacks the group)."""

    group: str
    status: str
    num_leaves: int = 0
    leaf: str = ""
    error: float = 0.0
    tolerance: float = 0.0
    num_by_slack: int = 0
    """Entries beyond the tolerance that their slack alone lets pass."""


class Parity:
    """Runs the model on a golden's inputs; each piece is compiled only when a group asks for it."""

    def __init__(self, golden: Golden, dtype: str | None = None, ops: Ops = REFERENCE_OPS):
        self.golden = golden
        self.arch: Architecture = architecture_of(golden, dtype)
        # Either side in bfloat16 makes the comparison one of bfloat16.
        self.tolerances = TOLERANCES["bfloat16" if "bfloat16" in (self.arch.dtype, golden.dtype) else "float32"]
        self.ops = ops
        self.programs = model_programs(self.arch, ops)
        self.params = golden.params()
        self.obs = golden.observation()
        self.actions = jnp.asarray(golden["actions"])
        self._check_parameters()

    def _check_parameters(self) -> None:
        expected = flatten(self.programs.shapes)
        found = flatten(self.params)
        for path in sorted(expected.keys() | found.keys()):
            if path not in found or path not in expected or found[path].shape != expected[path].shape:
                sides = [f"{side[path].shape}" if path in side else "nothing" for side in (found, expected)]
                raise UserError(
                    f"{self.golden.name}: params/{path} is {sides[0]}, but the other parameters imply {sides[1]}."
                )
        num_tokens = {
            (image.shape[1] // self.arch.vision.patch_size) * (image.shape[2] // self.arch.vision.patch_size)
            for image in self.obs.images.values()
        }
        if num_tokens != {self.arch.vision.num_tokens}:
            raise UserError(f"{self.golden.name}: the images do not give {self.arch.vision.num_tokens} tokens each.")

    @functools.cached_property
    def noise_time(self) -> tuple[jax.Array, jax.Array]:
        """The golden's noise and time, or what its key draws."""
        if "noise" in self.golden and "time" in self.golden:
            return jnp.asarray(self.golden["noise"]), jnp.asarray(self.golden["time"])
        return self.drawn

    @functools.cached_property
    def drawn(self) -> tuple[jax.Array, jax.Array]:
        """Noise and time drawn from the golden's key."""
        _, noise_rng, time_rng = jax.random.split(self.golden.key(), 3)
        return draw_noise_time(noise_rng, time_rng, self.actions.shape)

    def _loss_args(self, images: dict[str, jax.Array]) -> tuple[Any, ...]:
        """What the programs of the loss take."""
        return self.params, dataclasses.replace(self.obs, images=images), self.actions, *self.noise_time

    @functools.cached_property
    def forward(self) -> tuple[Forward, jax.Array]:
        """Everything of one pass without augmentation, and its dense mask B T T."""
        noise, time = self.noise_time
        x_t = time[:, None, None] * noise + (1 - time[:, None, None]) * self.actions
        return self.programs.forward(self.params, self.obs, x_t, time)

    @functools.cached_property
    def loss_and_grads(self) -> tuple[jax.Array, Params]:
        """Loss B A and the gradient of its mean, without augmentation."""
        return self.programs.loss_and_grads(*self._loss_args(to_float(self.obs.images)))

    @functools.cached_property
    def augmented(self) -> dict[str, jax.Array]:
        """Images B H W 3 after augmentation with the golden's preprocess key."""
        return augmented(jax.random.split(self.golden.key(), 3)[0], self.obs.images)

    def _compare(self, name: str, ours: Any, kind: str, rows: np.ndarray | None = None) -> Iterator[Leaf]:
        """One leaf per sample array that the golden has; only its first samples, only valid `rows` (B T)."""
        if name not in self.golden:
            return
        ours, golden = np.asarray(ours, np.float32)[: self.golden.num_samples], self.golden[name].astype(np.float32)
        if ours.shape != golden.shape:
            raise UserError(f"{self.golden.name}: {name} has shape {golden.shape}; its inputs give {ours.shape}.")
        if rows is not None:
            rows = rows[: self.golden.num_samples]
            ours, golden = ours[rows], golden[rows]
        yield Leaf(name, ours, golden, kind)

    def _prefix_tokens(self) -> Iterator[Leaf]:
        out, _ = self.forward
        yield from self._compare("fwd/prefix_tokens", out.prefix_tokens, "forward")

    def _suffix_tokens(self) -> Iterator[Leaf]:
        out, _ = self.forward
        yield from self._compare("fwd/suffix_tokens", out.suffix_tokens, "forward")
        if "fwd/adarms_cond" in self.golden:
            if out.cond is None:
                raise UserError(f"{self.golden.name} has fwd/adarms_cond, which pi0 does not have.")
            yield from self._compare("fwd/adarms_cond", out.cond, "forward")

    def _mask(self) -> Iterator[Leaf]:
        out, dense = self.forward
        yield from self._compare("fwd/prefix_mask", out.prefix_valid, "exact")
        yield from self._compare("fwd/attn_mask", dense, "exact")

    def _positions(self) -> Iterator[Leaf]:
        out, _ = self.forward
        yield from self._compare("fwd/positions", out.positions, "exact")

    def _outputs(self) -> Iterator[Leaf]:
        out, _ = self.forward
        # Rows of invalid tokens are never read: they attend uniformly to everything.
        yield from self._compare("fwd/prefix_out", out.prefix_out, "forward", rows=np.asarray(out.prefix_valid))
        yield from self._compare("fwd/suffix_out", out.suffix_out, "forward")

    def _velocity(self) -> Iterator[Leaf]:
        out, _ = self.forward
        yield from self._compare("fwd/velocity", out.velocity, "forward")

    def _loss_group(self) -> Iterator[Leaf]:
        if "rng_key_data" in self.golden:
            for name, drawn in zip(("noise", "time"), self.drawn, strict=True):
                if name in self.golden:
                    yield Leaf(f"{name} (drawn)", np.asarray(drawn), self.golden[name], "drawn")
        # The backward pass is compiled only for a golden that has gradients; both losses then come from that program.
        with_grads = bool(self.golden.under("grads"))
        if "fwd/loss" in self.golden:
            args = self._loss_args(to_float(self.obs.images))
            plain = self.loss_and_grads[0] if with_grads else self.programs.loss(*args)
            yield from self._with_mean("fwd/loss", plain)
        if "train_loss_augmented" in self.golden:
            args = self._loss_args(self.augmented)
            loss = self.programs.loss_and_grads(*args)[0] if with_grads else self.programs.loss(*args)
            yield from self._with_mean("train_loss_augmented", loss)

    def _with_mean(self, name: str, loss: jax.Array) -> Iterator[Leaf]:
        for leaf in self._compare(name, loss, "loss"):
            yield leaf
            yield Leaf(f"mean of {name}", np.asarray(leaf.ours.mean()), np.asarray(leaf.golden.mean()), "mean_loss")

    def _grads(self) -> Iterator[Leaf]:
        golden = self.golden.under("grads")
        if not golden:
            return
        ours = flatten(self.loss_and_grads[1])
        yield from same_paths(self.golden, "grads", ours, golden, "grads")

    def _augmented(self) -> Iterator[Leaf]:
        for camera in self.golden.under("augmented"):
            if camera not in self.obs.images:
                raise UserError(f"{self.golden.name}: augmented/{camera} has no obs/image/{camera}.")
            yield from self._compare(f"augmented/{camera}", self.augmented[camera], "augmented")

    def _train(self) -> Iterator[Leaf]:
        for comparison in train_leaves(self.golden, self.arch, self.ops):
            yield Leaf(*comparison)

    def _sample(self) -> Iterator[Leaf]:
        if "sample/actions" not in self.golden:
            return
        count = self.golden.num_samples
        noise = self.golden["sample/noise"]
        if noise.shape != (count, *self.actions.shape[1:]):
            raise UserError(f"{self.golden.name}: sample/noise has shape {noise.shape}; expected {count} samples.")
        obs = jax.tree.map(lambda x: x[:count], self.obs)
        yield from self._compare(
            "sample/actions", self.programs.sample(self.params, obs, jnp.asarray(noise)), "forward"
        )

    def leaves(self, group: str) -> list[Leaf]:
        """All comparisons of a group; none where the golden lacks it."""
        return list(GROUPS[group](self))

    def error(self, leaf: Leaf) -> tuple[float, float]:
        """(error, tolerance) of a leaf: max|a - b| / max|b|, absolute where stated in TOLERANCES' source."""
        tolerance = self.tolerances[leaf.kind]
        differences = np.abs(leaf.ours.astype(np.float64) - leaf.golden.astype(np.float64)) - leaf.slack
        difference = float(np.max(differences, initial=0.0))
        scale = float(np.max(np.abs(leaf.golden), initial=0.0))
        if leaf.kind in ("exact", "augmented"):
            return difference, tolerance
        if leaf.name.endswith(KEY_BIAS) and self.tolerances is TOLERANCES["bfloat16"]:
            return difference, KEY_BIAS_BF16_TOLERANCE
        if scale < ZERO:
            return difference, ZERO
        return difference / scale, tolerance

    def run(self, group: str) -> GroupResult:
        """Compares one group."""
        leaves = self.leaves(group)
        if not leaves:
            return GroupResult(group, "absent")
        errors = [(*self.error(leaf), leaf.name) for leaf in leaves]
        # The worst leaf is the one nearest to, or furthest beyond, its own tolerance; NaN is beyond all.
        error, tolerance, name = max(errors, key=lambda e: _badness(e[0], e[1]))
        ok = all(error <= tolerance for error, tolerance, _ in errors)
        by_slack = sum(self._num_by_slack(leaf) for leaf in leaves)
        return GroupResult(group, "ok" if ok else "out of tolerance", len(leaves), name, error, tolerance, by_slack)

    def _num_by_slack(self, leaf: Leaf) -> int:
        differences = np.abs(leaf.ours.astype(np.float64) - leaf.golden.astype(np.float64))
        allowed = self.tolerances[leaf.kind] * np.max(np.abs(leaf.golden), initial=0.0)
        return int(np.sum((differences > allowed) & (differences <= allowed + leaf.slack)))


def _badness(error: float, tolerance: float) -> float:
    if not np.isfinite(error):
        return np.inf
    return error / tolerance if tolerance else (np.inf if error else 0.0)


def same_paths(
    golden: Golden, prefix: str, ours: dict[str, jax.Array], theirs: dict[str, np.ndarray], kind: str
) -> Iterator[Leaf]:
    """One leaf per path that the golden holds.

    Raises:
        UserError: a path or shape that the model does not have.
    """
    for path, value in theirs.items():
        if path not in ours or ours[path].shape != value.shape:
            raise UserError(f"{golden.name}: {prefix}/{path} {value.shape} is no leaf of the model of its parameters.")
        yield Leaf(f"{prefix}/{path}", np.asarray(ours[path], np.float32), value, kind)


GROUPS: dict[str, Callable[[Parity], Iterator[Leaf]]] = {
    "prefix_tokens": Parity._prefix_tokens,
    "suffix_tokens": Parity._suffix_tokens,
    "mask": Parity._mask,
    "positions": Parity._positions,
    "outputs": Parity._outputs,
    "velocity": Parity._velocity,
    "loss": Parity._loss_group,
    "grads": Parity._grads,
    "augmented": Parity._augmented,
    "train": Parity._train,
    "sample": Parity._sample,
}
