"""Sharded parameters in use: gathered layer by layer inside the loop over the layers, gradients put back on shards.

Left to itself the compiler may shard activations along a weight's sharded axis instead, with the whole batch on every
device and a collective after every product. The constraints here say where everything lies, so that it cannot.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(table: jax.Array, tokens: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Rows of an embedding table that lies as `sharding` says: (V D, B L int32) -> B L D.

    Its gradient: the rows' gradients go to every device, which adds up those of the rows that it holds. Left to itself
    the compiler adds up a table of zeros on each device and sums these tables, gigabytes of them, over all of them.
    """
    return table[tokens]


def _look_up_fwd(
    table: jax.Array, tokens: jax.Array, sharding: NamedSharding
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return look_up(table, tokens, sharding), (table, tokens)


def _look_up_bwd(
    sharding: NamedSharding, residuals: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, None]:
    table, tokens = residuals
    tokens, grad = _to_all(tokens, grad, NamedSharding(sharding.mesh, PartitionSpec()))
    zeros = jax.lax.with_sharding_constraint(jnp.zeros(table.shape, table.dtype), sharding)
    return jax.lax.with_sharding_constraint(zeros.at[tokens].add(grad), sharding), None


def _to_all(tokens: jax.Array, rows: jax.Array, everywhere: NamedSharding) -> tuple[jax.Array, jax.Array]:
    """B L int32 and B L D on every device, each row in one message with its token.

    Tokens sent by themselves depend on nothing: a device may wait for them while it waits in a loop's collective, and
    two such devices for each other (seen on eight devices of one CPU, in the loop that draws the flow-matching times).
    """
    word = {2: jnp.uint16, 4: jnp.uint32}[rows.dtype.itemsize]  # as integers: bits that are no number must survive
    width = rows.shape[-1]
    names = jax.lax.bitcast_convert_type(tokens.astype(jnp.int32), word).reshape(*tokens.shape, -1)
    message = jnp.concatenate([jax.lax.bitcast_convert_type(rows, word), names], axis=-1)
    message = jax.lax.with_sharding_constraint(message, everywhere)
    rows, names = jax.lax.bitcast_convert_type(message[..., :width], rows.dtype), message[..., width:]
    return jax.lax.bitcast_convert_type(names if word == jnp.uint16 else names[..., 0], jnp.int32), rows


look_up.defvjp(_look_up_fwd, _look_up_bwd)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedLookUp:
    """`look_up` in the place of models.ops.look_up.

    Attributes:
        mesh: the devices.
        path: the table's in the parameter tree.
        min_num_elements: as the state was sharded.
    """

    mesh: Mesh | AbstractMesh
    path: str
    min_num_elements: int = MIN_NUM_ELEMENTS

    def __call__(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """The tokens' rows."""
        root, _, name = self.path.rpartition("/")
        placed = state_shardings({name: table}, self.mesh, root=f"{root}/", min_num_elements=self.min_num_elements)
        return look_up(table, tokens, placed[name])


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
