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
        unstacked = unstack(layers)
        for i in range(len(unstacked)):
            if i + 1 < len(unstacked):
                carry, unstacked[i + 1] = finish_gradients(carry, unstacked[i + 1])
            carry, out = body(carry, unstacked[i])
            outs.append(out)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


def unstack(layers: Any) -> list[Any]:
    """A pytree stacked on axis 0 -> one pytree per layer. The gradient is one stack, not a chain of padded sums."""
    leaves, treedef = jax.tree.flatten(layers)
    # Leaf by leaf: a frozen one stays one of which no gradient is asked.
    return [jax.tree.unflatten(treedef, layer) for layer in zip(*map(_unstack_leaf, leaves), strict=True)]


@jax.custom_vjp
def _unstack_leaf(leaf: jax.Array) -> list[jax.Array]:
    return [leaf[i] for i in range(leaf.shape[0])]


def _unstack_leaf_fwd(leaf: jax.Array) -> tuple[list[jax.Array], None]:
    return _unstack_leaf(leaf), None


def _unstack_leaf_bwd(_: None, grads: list[jax.Array]) -> tuple[jax.Array]:
    return (jnp.stack(grads),)


_unstack_leaf.defvjp(_unstack_leaf_fwd, _unstack_leaf_bwd)


@jax.custom_vjp
def finish_gradients(carry: Any, layer: Any) -> tuple[Any, Any]:
    """Both unchanged. In the backward pass what comes before waits until the gradients of `layer` are there.

    The compiler, left alone, may put off the products that make weights' gradients, to compute them while others are
    sent between devices, and what they need of each layer stays in memory until then.
    """
    return carry, layer


def _finish_gradients_fwd(carry: Any, layer: Any) -> tuple[tuple[Any, Any], list[tuple[()] | None]]:
    primals, treedef = jax.tree.flatten((carry, layer))
    # Empty containers: what is known while tracing must not become an array.
    wanted = [() if primal.perturbed else None for primal in primals]
    return jax.tree.unflatten(treedef, [primal.value for primal in primals]), wanted


def _finish_gradients_bwd(wanted: list[tuple[()] | None], grads: tuple[Any, Any]) -> tuple[Any, Any]:
    leaves, treedef = jax.tree.flatten(grads)
    held = [i for i, leaf in enumerate(leaves) if wanted[i] is not None and isinstance(leaf, jax.Array)]
    for i, leaf in zip(held, jax.lax.optimization_barrier([leaves[i] for i in held]), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(treedef, [leaf if wanted[i] is not None else None for i, leaf in enumerate(leaves)])


finish_gradients.defvjp(_finish_gradients_fwd, _finish_gradients_bwd, symbolic_zeros=True)
