"""pi0.5 and pi0: a vision-language prefix and an action expert that predicts the flow's velocity.

Shape letters: B batch, P prefix tokens, Q suffix tokens, A action horizon, E action dim, D width of the first expert,
F width of the action expert.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from openpi_accel.config.schema import CAMERA_SLOTS, Architecture
from openpi_accel.models.gemma import Gemma
from openpi_accel.models.layers import time_embedding
from openpi_accel.models.masks import AttentionMask, positions_of
from openpi_accel.models.ops import REFERENCE_OPS, Ops
from openpi_accel.models.siglip import Siglip
from openpi_accel.types import Observation


class PaliGemma(nnx.Module):
    """The vision tower and the two experts (Beyer et al. 2024)."""

    def __init__(self, arch: Architecture, ops: Ops, *, rngs: nnx.Rngs):
        self.llm = Gemma(arch, ops, rngs=rngs)
        self.img = Siglip(arch.vision, arch.paligemma.width, jnp.dtype(arch.dtype), ops, rngs=rngs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """One pass with its intermediate values.

    Attributes:
        prefix_tokens: B P D; prefix_valid: B P bool.
        suffix_tokens: B Q F; cond: B F, None in pi0.
        mask, positions: over prefix then suffix; B P+Q int32.
        prefix_out: B P D; suffix_out: B Q F, after the last norms.
        velocity: B A E float32.
    """

    prefix_tokens: jax.Array
    prefix_valid: jax.Array
    suffix_tokens: jax.Array
    cond: jax.Array | None
    mask: AttentionMask
    positions: jax.Array
    prefix_out: jax.Array
    suffix_out: jax.Array
    velocity: jax.Array


class Pi0(nnx.Module):
    """pi0.5 (Physical Intelligence 2025), or pi0 (Black et al. 2024) where `arch.pi05` is False.

    The attribute names are upstream's parameter paths.
    """

    def __init__(self, arch: Architecture, ops: Ops = REFERENCE_OPS, *, rngs: nnx.Rngs):
        width, dim = arch.action_expert.width, arch.action_dim
        self.arch, self.encode_cameras = arch, ops.encode_cameras
        self.PaliGemma = PaliGemma(arch, ops, rngs=rngs)
        self.action_in_proj = nnx.Linear(dim, width, rngs=rngs)
        self.action_out_proj = nnx.Linear(width, dim, rngs=rngs)
        if arch.pi05:
            self.time_mlp_in = nnx.Linear(width, width, rngs=rngs)
            self.time_mlp_out = nnx.Linear(width, width, rngs=rngs)
        else:
            self.state_proj = nnx.Linear(dim, width, rngs=rngs)
            self.action_time_mlp_in = nnx.Linear(2 * width, width, rngs=rngs)
            self.action_time_mlp_out = nnx.Linear(width, width, rngs=rngs)

    def embed_prefix(self, obs: Observation) -> tuple[jax.Array, jax.Array]:
        """Image tokens of the cameras that are there, in the slots' order, then the prompt.

        Args:
            obs: images float32 in [-1, 1].

        Returns:
            Tokens B P D in the compute dtype, and their validity B P bool.

        Raises:
            ValueError: a camera that is no slot of the model.
        """
        if unknown := set(obs.images) - set(CAMERA_SLOTS):
            raise ValueError(f"{sorted(unknown)} are no camera slots; the model has {CAMERA_SLOTS}")
        slots = [slot for slot in CAMERA_SLOTS if slot in obs.images]
        encoded = self.encode_cameras(self.PaliGemma.img, {slot: obs.images[slot] for slot in slots})
        tokens = [encoded[slot] for slot in slots]
        valid = [
            jnp.broadcast_to(obs.image_masks[slot][:, None], image_tokens.shape[:2])
            for slot, image_tokens in zip(slots, tokens, strict=True)
        ]
        tokens.append(self.PaliGemma.llm.embed(obs.tokenized_prompt))
        valid.append(obs.tokenized_prompt_mask)
        return jnp.concatenate(tokens, axis=1), jnp.concatenate(valid, axis=1)

    def embed_suffix(self, state: jax.Array, x_t: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Action tokens, after a state token in pi0. All suffix tokens are valid.

        Args:
            state: B E; x_t: B A E; time: B, 1 is noise and 0 data.

        Returns:
            Tokens B Q F float32, and the condition B F of the adaptive norms (None in pi0).
        """
        actions = self.action_in_proj(x_t)
        time_emb = time_embedding(time, self.arch.action_expert.width)
        if self.arch.pi05:
            cond = jax.nn.swish(self.time_mlp_out(jax.nn.swish(self.time_mlp_in(time_emb))))
            return actions, cond
        time_emb = jnp.broadcast_to(time_emb[:, None], actions.shape)
        mixed = jax.nn.swish(self.action_time_mlp_in(jnp.concatenate([actions, time_emb], axis=-1)))
        return jnp.concatenate([self.state_proj(state)[:, None], self.action_time_mlp_out(mixed)], axis=1), None

    def suffix_blocks(self) -> tuple[int, ...]:
        """Lengths of the attention blocks after the prefix: pi0's state token, the actions."""
        return (self.arch.action_horizon,) if self.arch.pi05 else (1, self.arch.action_horizon)

    def forward(self, obs: Observation, x_t: jax.Array, time: jax.Array) -> Forward:
        """One pass over all tokens. obs: images float32 in [-1, 1]; x_t: B A E; time: B."""
        prefix, prefix_valid = self.embed_prefix(obs)
        suffix, cond = self.embed_suffix(obs.state, x_t, time)
        valid = jnp.concatenate([prefix_valid, jnp.ones(suffix.shape[:2], bool)], axis=1)
        mask = AttentionMask(valid=valid, blocks=(prefix.shape[1], *self.suffix_blocks()), num_queries=valid.shape[1])
        positions = positions_of(valid)
        (prefix_out, suffix_out), _ = self.PaliGemma.llm((prefix, suffix), positions, mask, cond)
        assert prefix_out is not None and suffix_out is not None
        return Forward(
            prefix_tokens=prefix,
            prefix_valid=prefix_valid,
            suffix_tokens=suffix,
            cond=cond,
            mask=mask,
            positions=positions,
            prefix_out=prefix_out,
            suffix_out=suffix_out,
            velocity=self._velocity_of(suffix_out),
        )

    def velocity(self, obs: Observation, x_t: jax.Array, time: jax.Array) -> jax.Array:
        """The predicted flow noise - actions: B A E float32. Arguments as `forward`."""
        return self.forward(obs, x_t, time).velocity

    def sample_actions(self, obs: Observation, noise: jax.Array, num_steps: int = 10) -> jax.Array:
        """Integrates the flow from noise (time 1) to actions (time 0) by Euler steps; the prefix runs once.

        Args:
            obs: images float32 in [-1, 1]; noise: B A E; num_steps: Euler steps.

        Returns:
            B A E float32, normalised actions.
        """
        prefix, prefix_valid = self.embed_prefix(obs)
        length = prefix.shape[1]
        mask = AttentionMask(valid=prefix_valid, blocks=(length,), num_queries=length)
        llm = self.PaliGemma.llm
        _, cache = llm((prefix, None), positions_of(prefix_valid), mask, None, keep_cache=True)

        blocks = self.suffix_blocks()
        valid = jnp.concatenate([prefix_valid, jnp.ones((noise.shape[0], sum(blocks)), bool)], axis=1)
        mask = AttentionMask(valid=valid, blocks=(length, *blocks), num_queries=sum(blocks))
        positions = positions_of(valid)[:, length:]
        dt = -1.0 / num_steps

        def step(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
            x_t, time = carry
            suffix, cond = self.embed_suffix(obs.state, x_t, jnp.broadcast_to(time, noise.shape[:1]))
            outs, _no_cache = llm((None, suffix), positions, mask, cond, cache=cache)
            assert outs[1] is not None
            return (x_t + dt * self._velocity_of(outs[1]), time + dt), None

        (actions, _), _ = jax.lax.scan(step, (noise, jnp.float32(1.0)), None, length=num_steps)
        return actions

    def _velocity_of(self, suffix_out: jax.Array) -> jax.Array:
        return self.action_out_proj(suffix_out[:, -self.arch.action_horizon :])
