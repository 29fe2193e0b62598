"""The SigLIP vision tower (Zhai et al. 2023), So400m/14 in the full model.

Shape letters: B batch, S image tokens, N heads, H head dim, D width, P patch side.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from openpi_accel.config.schema import SiglipConfig
from openpi_accel.models.ops import Ops
from openpi_accel.models.stack import stack_modules

_XAVIER = nnx.initializers.xavier_uniform()
_TINY = nnx.initializers.normal(1e-6)


class Attention(nnx.Module):
    """Biased multi-head self-attention."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype, ops: Ops, *, rngs: nnx.Rngs):
        heads = (config.num_heads, config.width // config.num_heads)

        def project() -> nnx.LinearGeneral:
            return nnx.LinearGeneral(config.width, heads, kernel_init=_XAVIER, dtype=dtype, rngs=rngs)

        self.query, self.key, self.value = project(), project(), project()
        self.out = nnx.LinearGeneral(heads, config.width, axis=(-2, -1), kernel_init=_XAVIER, dtype=dtype, rngs=rngs)
        self.attention = ops.siglip_attention

    def __call__(self, x: jax.Array) -> jax.Array:
        """B S D -> B S D."""
        return self.out(self.attention(self.query(x), self.key(x), self.value(x)))


class Mlp(nnx.Module):
    """Dense, tanh GELU, Dense."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        def dense(n_in: int, n_out: int) -> nnx.Linear:
            return nnx.Linear(n_in, n_out, kernel_init=_XAVIER, bias_init=_TINY, dtype=dtype, rngs=rngs)

        self.Dense_0 = dense(config.width, config.mlp_dim)
        self.Dense_1 = dense(config.mlp_dim, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """B S D -> B S D."""
        return self.Dense_1(jax.nn.gelu(self.Dense_0(x)))


class EncoderBlock(nnx.Module):
    """Pre-normalised transformer block."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype, ops: Ops, *, rngs: nnx.Rngs):
        self.LayerNorm_0 = nnx.LayerNorm(config.width, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.MultiHeadDotProductAttention_0 = Attention(config, dtype, ops, rngs=rngs)
        self.LayerNorm_1 = nnx.LayerNorm(config.width, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.MlpBlock_0 = Mlp(config, dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """B S D -> B S D."""
        x = x + self.MultiHeadDotProductAttention_0(self.LayerNorm_0(x))
        return x + self.MlpBlock_0(self.LayerNorm_1(x))


class Transformer(nnx.Module):
    """The stacked blocks and the last normalisation."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype, ops: Ops, *, rngs: nnx.Rngs):
        self.encoderblock = stack_modules(lambda r: EncoderBlock(config, dtype, ops, rngs=r), config.depth, rngs)
        self.encoder_norm = nnx.LayerNorm(config.width, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.run_layers = ops.siglip_layers

    def __call__(self, x: jax.Array) -> jax.Array:
        """B S D -> B S D."""
        graphdef, layers = nnx.split(self.encoderblock)
        x, _ = self.run_layers(lambda x, layer: (nnx.merge(graphdef, layer)(x), None), x, layers)
        return self.encoder_norm(x)


class Siglip(nnx.Module):
    """Patches, position embedding, transformer, linear head; no pooling."""

    def __init__(self, config: SiglipConfig, out_width: int, dtype: jnp.dtype, ops: Ops, *, rngs: nnx.Rngs):
        patch = (config.patch_size, config.patch_size)
        self.embedding = nnx.Conv(3, config.width, patch, strides=patch, padding="VALID", rngs=rngs)
        pos_init = nnx.initializers.normal(config.width**-0.5)
        self.pos_embedding = nnx.Param(pos_init(rngs.params(), (1, config.num_tokens, config.width), jnp.float32))
        self.Transformer = Transformer(config, dtype, ops, rngs=rngs)
        self.head = nnx.Linear(config.width, out_width, kernel_init=nnx.initializers.zeros, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, images: jax.Array) -> jax.Array:
        """B H W 3 float32 in [-1, 1] -> B S out_width. Patches and positions are added in float32."""
        x = self.embedding(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.pos_embedding[...]
        return self.head(self.Transformer(x.astype(self.dtype)))
