"""Equal layers with their parameters stacked on axis 0: how they are made and how they run."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
from flax import nnx

# (carry, one layer's slice) -> (carry, one layer's output or None)
LayerBody = Callable[[Any, Any], tuple[Any, Any]]
# What jax.checkpoint may keep of a layer for the backward pass; None keeps nothing but its input.
Policy = Callable[..., Any] | None


class RunLayers(Protocol):
    """Runs a body over layers, first to last."""

    def __call__(self, body: LayerBody, carry: Any, layers: Any) -> tuple[Any, Any]:
        """`layers` is a pytree stacked on axis 0; returns the last carry and the stacked outputs."""
        ...


@dataclasses.dataclass(frozen=True)
class ScanLayers:
    """One `lax.scan`, each layer under `jax.checkpoint`.

    Attributes:
        policy: what the backward pass may keep of each layer; None keeps nothing but the carry (upstream's choice).
    """

    policy: Policy = None

    def __call__(self, body: LayerBody, carry: Any, layers: Any) -> tuple[Any, Any]:
        # Inside a scan no common-subexpression elimination can undo the recomputation, so its barriers are left out.
        return jax.lax.scan(jax.checkpoint(body, prevent_cse=False, policy=self.policy), carry, layers)


def stack_modules[M: nnx.Module](make: Callable[[nnx.Rngs], M], depth: int, rngs: nnx.Rngs) -> M:
    """One module whose every parameter has a leading axis of `depth`, each layer drawn from its own key."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    keys = jax.random.split(rngs.params(), depth)
    return nnx.merge(graphdef, jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(keys))
