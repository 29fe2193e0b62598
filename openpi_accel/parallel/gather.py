"""Sharded parameters in use: gathered layer by layer inside the loop over the layers, gradients put back on shards.

Left to itself the compiler may shard activations along a weight's sharded axis instead, with the whole batch on every
device and a collective after every product. The constraints here say where everything lies, so that it cannot.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from openpi_accel.parallel.sharding import MIN_NUM_ELEMENTS, batch_sharding, state_shardings

# As models.stack.RunLayers: (body, carry, layers stacked on axis 0) -> (carry, stacked outputs).
RunLayers = Callable[[Callable[[Any, Any], tuple[Any, Any]], Any, Any], tuple[Any, Any]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(shard: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A whole copy on every device of an array that lies as `sharding` says; its gradient is summed onto the shards."""
    return jax.lax.with_sharding_constraint(shard, NamedSharding(sharding.mesh, PartitionSpec()))


def _gather_fwd(shard: jax.Array, sharding: NamedSharding) -> tuple[jax.Array, None]:
    return gather(shard, sharding), None


def _gather_bwd(sharding: NamedSharding, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(grad, sharding),)


gather.defvjp(_gather_fwd, _gather_bwd)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredLayers:
    """Runs layers whose parameters are sharded: each layer's are gathered within it, in the backward pass again.

    Attributes:
        run: runs the layers on one device.
        mesh: the devices.
        root: path of the stack in the parameter tree, ending in a slash; the sharding rules are told by path.
        min_num_elements: as the state was sharded.
    """

    run: RunLayers
    mesh: Mesh | AbstractMesh
    root: str
    min_num_elements: int = MIN_NUM_ELEMENTS

    def __call__(self, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, layers: Any) -> tuple[Any, Any]:
        """As `run`. The carry's leaves have the batch first."""
        stacked = state_shardings(layers, self.mesh, root=self.root, min_num_elements=self.min_num_elements)
        of_layer = jax.tree.map(lambda s: NamedSharding(self.mesh, PartitionSpec(*s.spec[1:])), stacked)

        def gathered(carry: Any, layer: Any) -> tuple[Any, Any]:
            carry, out = body(self._by_sample(carry), jax.tree.map(gather, layer, of_layer))
            return self._by_sample(carry), out

        return self.run(gathered, carry, layers)

    def _by_sample(self, carry: Any) -> Any:
        return jax.lax.with_sharding_constraint(carry, batch_sharding(self.mesh))
