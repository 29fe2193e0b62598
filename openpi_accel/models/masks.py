"""Who sees whom, kept as structure so that an attention may use it without a dense mask.

Shape letters: B batch, T query tokens, S key tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """Block-causal visibility over S key tokens; the queries are the last T of them.

    The tokens fall into consecutive blocks (prefix, then pi0's state token, then the actions). A token sees the valid
    tokens of its own and of earlier blocks.

    Attributes:
        valid: B S bool, False where there is no token (padding, an absent camera).
        blocks: lengths of the blocks; they sum to S.
        num_queries: T.
    """

    valid: jax.Array
    blocks: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    num_queries: int = dataclasses.field(metadata={"static": True})

    def dense(self) -> jax.Array:
        """B T S bool. Rows and columns of invalid tokens are closed."""
        block_of = np.repeat(np.arange(len(self.blocks)), self.blocks)
        visible = block_of[None, :] <= block_of[-self.num_queries :, None]
        queries = self.valid[:, -self.num_queries :]
        return jnp.asarray(visible)[None] & self.valid[:, None, :] & queries[:, :, None]


def positions_of(valid: jax.Array) -> jax.Array:
    """B S bool -> B S int32: each token's index among the valid tokens; -1 before the first of them."""
    return jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1
