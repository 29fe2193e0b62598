"""Between the NNX model and plain nested dictionaries of arrays, which the trainer shards, saves and updates."""

from collections.abc import Callable

import jax
from flax import nnx

from openpi_accel.config.schema import Architecture
from openpi_accel.models.ops import REFERENCE_OPS, Ops
from openpi_accel.models.pi0 import Pi0
from openpi_accel.tree import flatten
from openpi_accel.types import Params


def init_params(arch: Architecture, key: jax.Array) -> Params:
    """Fresh float32 parameters. Pure: may run under jit with output shardings, or under eval_shape."""
    return nnx.to_pure_dict(nnx.state(Pi0(arch, rngs=nnx.Rngs(key)), nnx.Param))


def bind(arch: Architecture, ops: Ops = REFERENCE_OPS) -> Callable[[Params], Pi0]:
    """A function that gives the model of a parameter tree; cheap enough to be called inside a traced function.

    The tree's leaves may have any float dtype (frozen ones are bfloat16). The returned function raises ValueError
    when the tree's paths are not the model's.
    """
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Pi0(arch, ops, rngs=nnx.Rngs(0))))
    expected = list(flatten(nnx.to_pure_dict(abstract)))
    state_structure = jax.tree.structure(abstract)

    def model_of(params: Params) -> Pi0:
        flat = flatten(params)
        if list(flat) != expected:
            wrong = sorted(set(flat) ^ set(expected))
            raise ValueError(f"the parameter tree does not fit the model; missing or unexpected: {wrong}")
        return nnx.merge(graphdef, jax.tree.unflatten(state_structure, list(flat.values())))

    return model_of
