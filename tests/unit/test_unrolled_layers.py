"""Unrolled layers: the loop's own gradients, each layer's finished in turn, and none of what is frozen."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_accel.accel.layers import POLICIES, UnrolledLayers, finish_gradients
from openpi_accel.models.stack import RunLayers, ScanLayers

DEPTH, WIDTH = 4, 8
Layers = dict[str, jax.Array]


def layers() -> Layers:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        name: 0.5 * jax.random.normal(key, (DEPTH, WIDTH, WIDTH)) for name, key in zip(("a", "b"), keys, strict=True)
    }


def loss(trained: Layers, frozen: Layers, x: jax.Array, run_layers: RunLayers) -> jax.Array:
    def body(carry: tuple[jax.Array, None], layer: tuple[Layers, None]) -> tuple[tuple[jax.Array, None], jax.Array]:
        (x, absent), (weights, _) = carry, layer
        return (x + jnp.tanh(x @ weights["a"]) @ weights["b"], absent), x.sum()

    (x, _), sums = run_layers(body, (x, None), (trained | frozen, None))
    return (x**2).sum() + (sums**2).sum()


X = jax.random.normal(jax.random.key(1), (3, WIDTH))


def products(function: Any, *args: Any) -> int:
    """Matrix products in the optimised program."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return text.count(" dot(")


@pytest.mark.parametrize("policy", list(POLICIES))
def test_gradients_are_the_scans(policy: Any) -> None:
    grads = [
        jax.jit(jax.grad(functools.partial(loss, run_layers=runs), argnums=(0, 2)))(layers(), {}, X)
        for runs in (UnrolledLayers(POLICIES[policy]), ScanLayers(POLICIES[policy]))
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5), *grads)


def test_a_layers_gradients_are_finished_before_the_layer_before_the_last_begins() -> None:
    jaxpr = jax.make_jaxpr(jax.grad(functools.partial(loss, run_layers=UnrolledLayers(None)), argnums=(0, 2)))(
        layers(), {}, X
    )
    barriers = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    # The carry's gradient, and those of both weights of the layer after: a barrier for every layer but the first.
    held = [[var.aval.shape for var in eqn.invars] for eqn in barriers]
    assert held == [[X.shape, (WIDTH, WIDTH), (WIDTH, WIDTH)]] * (DEPTH - 1)
    # What a barrier gives of the carry goes on into the layer before; the barrier after waits for that.
    for barrier, later in itertools.pairwise(barriers):
        assert depends(jaxpr.jaxpr, later.invars[0], barrier.outvars[0])


def depends(jaxpr: Any, var: Any, source: Any) -> bool:
    made_by = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    seen, stack = set(), [var]
    while stack:
        one = stack.pop()
        if one is source:
            return True
        if one in made_by and one not in seen:
            seen.add(one)
            stack.extend(v for v in made_by[one].invars if not hasattr(v, "val"))
    return False


def test_of_frozen_weights_no_gradient_is_computed() -> None:
    all_layers = layers()
    trained, frozen = {"a": all_layers["a"]}, {"b": all_layers["b"]}
    unrolled = functools.partial(loss, run_layers=UnrolledLayers(POLICIES["none"]))
    partly = products(jax.grad(unrolled), trained, frozen, X)
    # Forward, and backwards to the input of each layer: two each; the gradient of one weight of each: one.
    both = products(jax.grad(unrolled), all_layers, {}, X)
    assert both == partly + DEPTH


def test_without_a_gradient_nothing_is_added() -> None:
    carry, layer = finish_gradients((X, None), {"w": X})
    assert carry[0] is X and layer["w"] is X
    jaxpr = jax.make_jaxpr(functools.partial(loss, run_layers=UnrolledLayers(None)))(layers(), {}, X)
    assert "optimization_barrier" not in str(jaxpr)
