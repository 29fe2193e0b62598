"""Small layers of the Gemma experts and the action head.

Shape letters: B batch, T tokens, D width, N heads, H head dim, L low rank.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from openpi_accel.config.schema import LoraConfig

_LORA_INIT = nnx.initializers.normal(0.01)


class RMSNorm(nnx.Module):
    """Root mean square normalisation with a learned scale around 1 (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(nnx.initializers.zeros(rngs.params(), (width,), jnp.float32))

    def __call__(self, x: jax.Array, cond: jax.Array | None) -> tuple[jax.Array, None]:
        """x: B T D -> (B T D, no gate). Takes `cond` only to share the signature of AdaRMSNorm."""
        del cond
        # In float32 also where the scale is frozen in bfloat16: compiled, upstream's sum is never rounded to bfloat16.
        scale = 1 + self.scale[...].astype(jnp.float32)
        return (_unit_rms(x) * scale[None, None]).astype(x.dtype), None


class AdaRMSNorm(nnx.Module):
    """RMS normalisation whose scale, shift and residual gate come from a condition (Peebles and Xie 2023, adaLN)."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.Dense_0 = nnx.Linear(width, 3 * width, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: jax.Array, cond: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """x: B T D, cond: B D -> (B T D, gate B 1 D). The dense layer runs in x's dtype."""
        assert cond is not None
        kernel, bias = self.Dense_0.kernel, self.Dense_0.bias
        assert bias is not None
        modulation = cond.astype(x.dtype) @ kernel[...].astype(x.dtype) + bias[...].astype(x.dtype)[None]
        scale, shift, gate = jnp.split(modulation[:, None], 3, axis=-1)
        return (_unit_rms(x) * (1 + scale) + shift).astype(x.dtype), gate


def _unit_rms(x: jax.Array) -> jax.Array:
    """x: B T D -> B T D float32 of mean square 1."""
    x = x.astype(jnp.float32)
    return x * jax.lax.reciprocal(jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6))


def gated_residual(x: jax.Array, y: jax.Array, gate: jax.Array | None) -> jax.Array:
    """x + y, or x + y * gate."""
    return x + y if gate is None else x + y * gate


class Einsum(nnx.Module):
    """A weight applied by einsum in x's dtype, with an optional low-rank delta times alpha / rank.

    The factors keep the weight's axes but for its contracted feature axis (last of `lora_a` becomes the rank) and its
    output axis (last but one of `lora_b` becomes the rank), as upstream's do.
    """

    def __init__(self, shape: tuple[int, ...], in_axes: tuple[int, ...], lora: LoraConfig | None, *, rngs: nnx.Rngs):
        batch_axes = tuple(axis for axis in range(len(shape) - 1) if axis - len(shape) not in in_axes)
        init = nnx.initializers.lecun_normal(in_axis=in_axes, out_axis=-1, batch_axis=batch_axes)
        self.w = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.lora = lora
        if lora is not None:
            shape_a, shape_b = (*shape[:-1], lora.rank), (*shape[:-2], lora.rank, shape[-1])
            self.lora_a = nnx.Param(_LORA_INIT(rngs.params(), shape_a, jnp.float32))
            self.lora_b = nnx.Param(_LORA_INIT(rngs.params(), shape_b, jnp.float32))

    def __call__(self, x: jax.Array, equation: str, equations_lora: tuple[str, str]) -> jax.Array:
        """Applies `equation` to (x, w); the two `equations_lora` take x through a, then b."""
        y = jnp.einsum(equation, x, self.w[...].astype(x.dtype))
        if self.lora is None:
            return y
        delta = jnp.einsum(equations_lora[0], x, self.lora_a[...].astype(x.dtype))
        delta = jnp.einsum(equations_lora[1], delta, self.lora_b[...].astype(x.dtype))
        return y + delta * (self.lora.alpha / self.lora.rank)


class FeedForward(nnx.Module):
    """Gated MLP: (gelu(x W_gate) * x W_up) W_down, tanh GELU, no biases; low-rank deltas are added unscaled."""

    def __init__(self, width: int, mlp_dim: int, lora: LoraConfig | None, *, rngs: nnx.Rngs):
        gating_init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
        self.gating_einsum = nnx.Param(gating_init(rngs.params(), (2, width, mlp_dim), jnp.float32))
        self.linear = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (mlp_dim, width), jnp.float32))
        self.has_lora = lora is not None
        if lora is not None:
            for name, shape in (
                ("gating_einsum_lora_a", (2, width, lora.rank)),
                ("gating_einsum_lora_b", (2, lora.rank, mlp_dim)),
                ("linear_lora_a", (mlp_dim, lora.rank)),
                ("linear_lora_b", (lora.rank, width)),
            ):
                setattr(self, name, nnx.Param(_LORA_INIT(rngs.params(), shape, jnp.float32)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """B T D -> B T D in x's dtype."""
        gate = jax.nn.gelu(self._project(x, "gating_einsum", 0))
        return self._project(gate * self._project(x, "gating_einsum", 1), "linear")

    def _project(self, x: jax.Array, name: str, index: int | None = None) -> jax.Array:
        def weight(suffix: str = "") -> jax.Array:
            value = getattr(self, name + suffix)[...]
            return (value if index is None else value[index]).astype(x.dtype)

        y = x @ weight()
        return y + (x @ weight("_lora_a")) @ weight("_lora_b") if self.has_lora else y


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding on split halves, base 10000, in float32 (Su et al. 2021).

    x: B T N H, positions: B T -> B T N H in x's dtype.
    """
    half = x.shape[-1] // 2
    timescale = 10_000 ** ((2.0 / x.shape[-1]) * jnp.arange(half, dtype=jnp.float32))
    radians = positions.astype(jnp.float32)[:, :, None, None] / timescale[None, None, None]
    sin, cos = jnp.sin(radians), jnp.cos(radians)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def time_embedding(time: jax.Array, width: int) -> jax.Array:
    """Sines then cosines of 2 pi t / period, periods geometric from 4e-3 to 4. time: B -> B width, float32."""
    period = 4e-3 * 1000.0 ** jnp.linspace(0.0, 1.0, width // 2, dtype=jnp.float32)
    # Angles reach 1500, where one rounding is 1e-4: the order of these factors and the full precision are upstream's.
    angle = jnp.einsum("B,D->BD", time, 1.0 / period * 2 * jnp.pi, precision=jax.lax.Precision.HIGHEST)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
