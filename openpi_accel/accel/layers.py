"""Ways to run a stack of equal layers: what the backward pass keeps, and whether the loop is unrolled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from openpi_accel.accel.attention import ATTENTION, CUDNN_FORWARD
from openpi_accel.config.schema import RematPolicy
from openpi_accel.models.stack import LayerBody, Policy


def _is_cudnn_forward(primitive: Any, *_: Any, **__: Any) -> bool:
    return bool(primitive.name == CUDNN_FORWARD)


# What the backward pass keeps of a layer, as policies of jax.checkpoint. full: its input alone, as the reference. dots:
# also the results of products with weights, and what attention takes and gives; normalisations, activations and
# probabilities are recomputed. none: everything.
POLICIES: dict[RematPolicy, Policy] = {
    "full": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _is_cudnn_forward
        ),
        jax.checkpoint_policies.save_only_these_names(ATTENTION),
    ),
    "none": jax.checkpoint_policies.everything_saveable,
}


@dataclasses.dataclass(frozen=True)
class UnrolledLayers:
    """A plain loop over the layers: no copies of stacked residuals, and whatever of a layer feeds nothing is dropped
    (of the last one, the first expert's queries, attention output and MLP).

    Attributes:
        policy: what the backward pass keeps; see models.stack.ScanLayers.
    """

    policy: Policy

    def __call__(self, body: LayerBody, carry: Any, layers: Any) -> tuple[Any, Any]:
        body, outs = jax.checkpoint(body, policy=self.policy), []
        for layer in unstack(layers):
            carry, out = body(carry, layer)
            outs.append(out)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


@jax.custom_vjp
def unstack(layers: Any) -> list[Any]:
    """A pytree stacked on axis 0 -> one pytree per layer. The gradient is one stack, not a chain of padded sums."""
    depth = jax.tree.leaves(layers)[0].shape[0]
    return [jax.tree.map(lambda leaf: leaf[i], layers) for i in range(depth)]  # noqa: B023


def _unstack_fwd(layers: Any) -> tuple[list[Any], None]:
    return unstack(layers), None


def _unstack_bwd(_: None, grads: list[Any]) -> tuple[Any]:
    return (jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads),)


unstack.defvjp(_unstack_fwd, _unstack_bwd)
