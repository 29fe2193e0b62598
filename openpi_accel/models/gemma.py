"""Two Gemma experts (Gemma Team 2024) side by side: own weights each, one attention over all tokens.

The first expert reads images and prompt, the second (suffix `_1`) the state and action tokens.

Shape letters: B batch, T query tokens, S key tokens, D width, N query heads, K key/value heads, H head dim,
L low rank, V vocabulary, Y layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from openpi_accel.config.schema import Architecture, GemmaConfig
from openpi_accel.models.attention import split_tokens
from openpi_accel.models.layers import AdaRMSNorm, Einsum, FeedForward, RMSNorm, gated_residual, rope
from openpi_accel.models.masks import AttentionMask
from openpi_accel.models.ops import LookUp, Ops
from openpi_accel.models.stack import stack_modules

SUFFIXES = ("", "_1")
# One entry per expert; None where an expert has no tokens in this pass.
PerExpert = tuple[jax.Array | None, jax.Array | None]
# Rotated keys and values: (Y B S K H, Y B S K H) for all layers.
KVCache = tuple[jax.Array, jax.Array]


def _norm(arch: Architecture, expert: int, width: int, rngs: nnx.Rngs) -> nnx.Module:
    return (AdaRMSNorm if arch.pi05 and expert == 1 else RMSNorm)(width, rngs=rngs)


class Attention(nnx.Module):
    """Projections of both experts around one attention over their concatenated tokens."""

    def __init__(self, experts: tuple[GemmaConfig, GemmaConfig], ops: Ops, *, rngs: nnx.Rngs):
        for suffix, c in zip(SUFFIXES, experts, strict=True):
            q, kv = (c.num_heads, c.width, c.head_dim), (2, c.num_kv_heads, c.width, c.head_dim)
            setattr(self, f"q_einsum{suffix}", Einsum(q, (-2,), c.lora, rngs=rngs))
            setattr(self, f"kv_einsum{suffix}", Einsum(kv, (-2,), c.lora, rngs=rngs))
            out = (c.num_heads, c.head_dim, c.width)
            setattr(self, f"attn_vec_einsum{suffix}", Einsum(out, (-3, -2), c.lora, rngs=rngs))
        self.attention = ops.gemma_attention

    def __call__(
        self, xs: PerExpert, positions: jax.Array, mask: AttentionMask, cache: KVCache | None
    ) -> tuple[PerExpert, KVCache]:
        """xs: per expert B T_i D_i -> the same shapes, and the keys and values (B S K H each) including the cache's."""
        parts, start = [], 0
        for suffix, x in zip(SUFFIXES, xs, strict=True):
            if x is not None:
                at = positions[:, start : start + x.shape[1]]
                start += x.shape[1]
                q = getattr(self, f"q_einsum{suffix}")(x, "BTD,NDH->BTNH", ("BTD,NDL->BTNL", "BTNL,NLH->BTNH"))
                kv = getattr(self, f"kv_einsum{suffix}")(x, "BSD,2KDH->2BSKH", ("BSD,2KDL->2BSKL", "2BSKL,2KLH->2BSKH"))
                # Rotated before they are joined: an attention by blocks takes them apart again at no cost.
                parts.append((rope(q, at), rope(kv[0], at), kv[1]))
        q, k, v = (jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True))
        if cache is not None:
            k, v = jnp.concatenate([cache[0], k], axis=1), jnp.concatenate([cache[1], v], axis=1)
        lengths = [x.shape[1] for x in xs if x is not None]
        encoded = iter(split_tokens(self.attention(q, k, v, mask), lengths))

        outs: list[jax.Array | None] = []
        for suffix, x in zip(SUFFIXES, xs, strict=True):
            if x is None:
                outs.append(None)
                continue
            out = getattr(self, f"attn_vec_einsum{suffix}")
            outs.append(out(next(encoded), "BTNH,NHD->BTD", ("BTNH,NHL->BTL", "BTL,NLD->BTD")))
        return (outs[0], outs[1]), (k, v)


class Block(nnx.Module):
    """Norm, attention, residual; norm, MLP, residual; per expert, the residuals gated where the norm is adaptive."""

    def __init__(self, arch: Architecture, ops: Ops, *, rngs: nnx.Rngs):
        experts = (arch.paligemma, arch.action_expert)
        self.attn = Attention(experts, ops, rngs=rngs)
        for i, (suffix, c) in enumerate(zip(SUFFIXES, experts, strict=True)):
            setattr(self, f"pre_attention_norm{suffix}", _norm(arch, i, c.width, rngs))
            setattr(self, f"pre_ffw_norm{suffix}", _norm(arch, i, c.width, rngs))
            setattr(self, f"mlp{suffix}", FeedForward(c.width, c.mlp_dim, c.lora, rngs=rngs))

    def __call__(
        self, xs: PerExpert, positions: jax.Array, mask: AttentionMask, cond: jax.Array | None, cache: KVCache | None
    ) -> tuple[PerExpert, KVCache]:
        """xs: per expert B T_i D_i -> the same shapes, and this layer's keys and values."""
        normed, gates = self._norms("pre_attention_norm", xs, cond)
        attended, cache = self.attn(normed, positions, mask, cache)
        xs = _residuals(xs, attended, gates)
        normed, gates = self._norms("pre_ffw_norm", xs, cond)
        fed = tuple(
            None if x is None else getattr(self, f"mlp{suffix}")(x) for suffix, x in zip(SUFFIXES, normed, strict=True)
        )
        return _residuals(xs, (fed[0], fed[1]), gates), cache

    def _norms(self, name: str, xs: PerExpert, cond: jax.Array | None) -> tuple[PerExpert, PerExpert]:
        pairs = [
            (None, None) if x is None else getattr(self, f"{name}{suffix}")(x, cond)
            for suffix, x in zip(SUFFIXES, xs, strict=True)
        ]
        return (pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1])


def _residuals(xs: PerExpert, ys: PerExpert, gates: PerExpert) -> PerExpert:
    first, second = (
        None if x is None or y is None else gated_residual(x, y, gate) for x, y, gate in zip(xs, ys, gates, strict=True)
    )
    return first, second


class Embedder(nnx.Module):
    """The token embedding table."""

    def __init__(self, vocab_size: int, width: int, *, rngs: nnx.Rngs):
        self.input_embedding = nnx.Param(nnx.initializers.normal(0.01)(rngs.params(), (vocab_size, width), jnp.float32))

    def __call__(self, tokens: jax.Array, look_up: LookUp) -> jax.Array:
        """B L int32 -> B L D in the table's dtype: the row times sqrt(D)."""
        rows = look_up(self.input_embedding[...], tokens)
        return rows * jnp.sqrt(rows.shape[-1]).astype(rows.dtype)


class Gemma(nnx.Module):
    """Both experts: embedding, stacked blocks, last normalisations."""

    def __init__(self, arch: Architecture, ops: Ops, *, rngs: nnx.Rngs):
        self.embedder = Embedder(arch.vocab_size, arch.paligemma.width, rngs=rngs)
        self.layers = stack_modules(lambda r: Block(arch, ops, rngs=r), arch.paligemma.depth, rngs)
        self.final_norm = _norm(arch, 0, arch.paligemma.width, rngs)
        self.final_norm_1 = _norm(arch, 1, arch.action_expert.width, rngs)
        self.dtype = jnp.dtype(arch.dtype)
        self.run_layers, self.look_up = ops.gemma_layers, ops.look_up

    def embed(self, tokens: jax.Array) -> jax.Array:
        """B L int32 -> B L D in the compute dtype."""
        return self.embedder(tokens, self.look_up).astype(self.dtype)

    def __call__(
        self,
        xs: PerExpert,
        positions: jax.Array,
        mask: AttentionMask,
        cond: jax.Array | None,
        cache: KVCache | None = None,
        keep_cache: bool = False,
    ) -> tuple[PerExpert, KVCache | None]:
        """Runs the tokens of one or both experts.

        Args:
            xs: per expert B T_i D_i, or None.
            positions: B T int32 over the tokens of this pass.
            mask: over the cached keys and the tokens of this pass.
            cond: B D of the action expert, for its adaptive norms; None in pi0.
            cache: keys and values of tokens that come before these.
            keep_cache: return the keys and values (static).

        Returns:
            Per expert B T_i D_i after the last norm, in the compute dtype; and the cache, where kept.
        """
        graphdef, layers = nnx.split(self.layers)

        def body(xs: PerExpert, layer: tuple[Any, KVCache | None]) -> tuple[PerExpert, KVCache | None]:
            xs, new_cache = nnx.merge(graphdef, layer[0])(xs, positions, mask, cond, layer[1])
            return xs, new_cache if keep_cache else None

        first, second = (None if x is None else x.astype(self.dtype) for x in xs)
        (first, second), new_cache = self.run_layers(body, (first, second), (layers, cache))
        first = None if first is None else self.final_norm(first, cond)[0]
        second = None if second is None else self.final_norm_1(second, cond)[0]
        return (first, second), new_cache
