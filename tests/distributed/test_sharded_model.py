"""The tiny pi0.5 on one device, data parallel, sharded, and both: the same numbers, and who sends what to whom."""

import collections
import dataclasses
import functools
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from openpi_accel import tree
from openpi_accel.models.ops import look_up as plain_look_up
from openpi_accel.parallel.collectives import Collective, read_collectives
from openpi_accel.parallel.gather import ShardedLookUp
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.parallel.sharding import batch_sharding
from openpi_accel.tools.scaling.traffic import step_transfers
from tests.conftest import NUM_CPU_DEVICES, REPO
from tests.distributed.sharded_step import MIN_NUM_ELEMENTS, StepResult, run_step
from tests.distributed.test_devices import cluster_of_two

# The key of a SigLIP layer's bias shifts every logit of a row alike: its exact gradient is 0.
ZERO_GRADIENT = "MultiHeadDotProductAttention_0/key/bias"
# Largest difference of a leaf's gradient over its largest entry: sums over 8 samples in one product or in 8.
ROUNDING = 1e-4
STACKS = ("PaliGemma/llm/layers/", "PaliGemma/img/Transformer/encoderblock/")
DATA_PARALLEL, SHARDED, HYBRID = (1, 8), (8, 8), (4, 8)
UNROLLED: dict[str, Any] = {"unroll_layers": True, "cast_early": True, "flash_attn": True, "remat": "dots"}


def step_of(layout: tuple[int, int], unrolled: bool = False) -> StepResult:
    return _step_of(layout, unrolled)


@functools.cache
def _step_of(layout: tuple[int, int], unrolled: bool) -> StepResult:
    """To a cache, an argument left out is another call than its default."""
    assert jax.device_count() == 8
    return run_step(*layout, **(UNROLLED if unrolled else {}))


def collectives_of(layout: tuple[int, int], unrolled: bool = False) -> tuple[Collective, ...]:
    return _collectives_of(layout, unrolled)


@functools.cache
def _collectives_of(layout: tuple[int, int], unrolled: bool) -> tuple[Collective, ...]:
    """Those of arrays: what is drawn by rejection asks every device by one byte whether all are content."""
    found = read_collectives(step_of(layout, unrolled).hlo)
    return tuple(c for c in found if any(math.prod(shape) > 1 for _, shape in c.results))


def assert_same(loss: float, grad_norm: float, gradients: dict[str, np.ndarray], reference: StepResult) -> None:
    np.testing.assert_allclose([loss, grad_norm], [reference.loss, reference.grad_norm], rtol=2e-5)
    assert list(gradients) == list(reference.gradients)
    for path, want in reference.gradients.items():
        scale = 1.0 if path.endswith(ZERO_GRADIENT) else float(np.abs(want).max())
        assert float(np.abs(gradients[path] - want).max()) <= ROUNDING * scale, path


@dataclasses.dataclass(frozen=True)
class Leaf:
    path: str
    shape: tuple[int, ...]
    sharded: bool

    @property
    def stacked(self) -> bool:
        return self.path.startswith(STACKS)

    @property
    def summed_on_shards(self) -> bool:
        """The gradient of the positions is no product but a sum over samples, made whole on every device; at full size
        they are too small to be sharded."""
        return self.sharded and not self.path.endswith("pos_embedding")

    @property
    def used(self) -> tuple[int, ...]:
        """What a layer, or the model, computes with; without axes of one, which the compiler adds and drops."""
        return tuple(size for size in (self.shape[1:] if self.stacked else self.shape) if size > 1)


def leaves(result: StepResult) -> list[Leaf]:
    return [
        Leaf(path, leaf.shape, bool(leaf.sharding.spec)) for path, leaf in tree.flatten(result.abstract.params).items()
    ]


def gathered(collectives: tuple[Collective, ...], in_loop: bool) -> "collections.Counter[tuple[Any, int]]":
    """(shape without axes of one, times) -> how many arrays are gathered so."""
    return collections.Counter(
        (tuple(size for size in shape if size > 1), c.times)
        for c in collectives
        if c.kind == "all-gather" and c.in_loop == in_loop
        for _, shape in c.results
    )


def summed_bytes(collectives: tuple[Collective, ...], group_size: int) -> int:
    """Bytes that go into sums over groups of this size."""
    sums = [c for c in collectives if c.group_size == group_size and c.kind in ("all-reduce", "reduce-scatter")]
    return sum(c.times * c.result_bytes * (group_size if c.kind == "reduce-scatter" else 1) for c in sums)


def gradient_bytes(layout: tuple[int, int], unrolled: bool, sharded: bool) -> int:
    """Of the gradients of the leaves that are sharded, or not; without the table, whose rows are looked up and summed,
    and without what feeds nothing: the first expert's last norm, and where layers are unrolled what is dead in them."""
    total, result = 0, step_of(layout, unrolled)
    for leaf in leaves(result):
        if leaf.summed_on_shards != sharded or leaf.path.endswith("input_embedding"):
            continue
        parts = np.split(result.gradients[leaf.path], leaf.shape[0]) if leaf.stacked else [result.gradients[leaf.path]]
        # The dead queries of the last layer: a product with zeros, which the CPU's compiler keeps.
        alive = [bool(part.any()) or leaf.path.endswith("attn/q_einsum/w") for part in parts]
        num = sum(alive) if unrolled else len(parts) * any(alive)
        total += num * parts[0].nbytes
    return total


@pytest.mark.parametrize(
    ("layout", "unrolled"),
    [(DATA_PARALLEL, False), (SHARDED, False), (HYBRID, False), (HYBRID, True)],
    ids=["dp 8", "fsdp 8", "2 x fsdp 4", "2 x fsdp 4, unrolled"],
)
def test_eight_devices_give_the_loss_and_gradients_of_one(layout: tuple[int, int], unrolled: bool) -> None:
    got, one = step_of(layout, unrolled), step_of((1, 1))
    assert_same(got.loss, got.grad_norm, got.gradients, one)


@pytest.mark.parametrize("layout", [SHARDED, HYBRID])
def test_bytes_per_device_fall_as_one_over_n(layout: tuple[int, int]) -> None:
    fsdp, result, one = layout[0], step_of(layout), step_of((1, 1))
    small = sum(4 * math.prod(leaf.shape) for leaf in leaves(result) if math.prod(leaf.shape) < MIN_NUM_ELEMENTS)
    assert small < one.params_bytes / 50
    assert result.params_bytes == small + (one.params_bytes - small) // fsdp
    # Parameters, their average and both of Adam's; a few counters beside them.
    assert 0 < result.state_bytes - 4 * result.params_bytes < 64
    arguments = one.memory.argument_size_in_bytes - result.memory.argument_size_in_bytes
    assert arguments >= one.state_bytes - result.state_bytes


def test_data_parallel_sums_gradients_and_moves_nothing_else() -> None:
    collectives = collectives_of(DATA_PARALLEL)
    assert {c.group_size for c in collectives} == {8}
    # Of the table the rows that occur, 8 samples of 8 tokens, not all 512.
    rows = [c for c in collectives if c.kind != "all-reduce"]
    assert {c.kind for c in rows} == {"all-gather"} and sum(c.result_bytes for c in rows) == 8 * 8 * (4 * 64 + 4)
    total = gradient_bytes(DATA_PARALLEL, unrolled=False, sharded=False)
    assert total > 0.99 * (step_of((1, 1)).params_bytes - 4 * 512 * 64)
    assert total <= summed_bytes(collectives, 8) < total + 64  # each gradient once, and the loss
    assert sum(c.in_loop for c in collectives) == 2  # a layer's are on their way while the layer below computes


@pytest.mark.parametrize("layout", [SHARDED, HYBRID], ids=["fsdp 8", "2 x fsdp 4"])
def test_layers_are_gathered_one_by_one_inside_the_scan(layout: tuple[int, int]) -> None:
    collectives, params = collectives_of(layout), leaves(step_of(layout))
    # Each layer's parameters twice, in the forward and in the backward pass, and never more than one layer at once.
    expected: collections.Counter[tuple[Any, int]] = collections.Counter()
    for leaf in params:
        if leaf.stacked and leaf.sharded:
            expected[(leaf.used, leaf.shape[0])] += 2
    assert len(expected) > 5 and gathered(collectives, in_loop=True) == expected
    assert_no_resharding(layout, collectives, unrolled=False)


def test_unrolled_layers_are_gathered_one_by_one() -> None:
    collectives, params = collectives_of(HYBRID, unrolled=True), leaves(step_of(HYBRID))
    got = gathered(collectives, in_loop=False)
    layers: collections.Counter[tuple[int, ...]] = collections.Counter()
    for leaf in params:
        if leaf.stacked and leaf.sharded:
            layers[leaf.used] += leaf.shape[0]
    for used, number in layers.items():
        # Twice at the most. Some of the last layer's feed nothing; and where, as on the CPU, the compiler drops
        # barriers early, it makes one gather of two that give the same.
        assert number / 2 < got[(used, 1)] <= 2 * number + sum(not p.stacked and p.used == used for p in params), used
    assert gathered(collectives, in_loop=True) == collections.Counter()
    assert_no_resharding(HYBRID, collectives, unrolled=True)


@pytest.mark.parametrize("layout", [DATA_PARALLEL, SHARDED, HYBRID], ids=["dp 8", "fsdp 8", "2 x fsdp 4"])
def test_the_planner_reckons_what_the_compiler_made(layout: tuple[int, int]) -> None:
    params, fsdp = step_of(layout).abstract.params, layout[0]
    transfers = step_transfers(params, layer_itemsize=4, vision_passes=1, num_tokens=fsdp * 8)
    size = {"fsdp": fsdp, "batch": 8 // fsdp, "all": 8}
    for group_size in {2, 4, 8}:
        gathers = [c for c in collectives_of(layout) if c.kind == "all-gather" and c.group_size == group_size]
        of_size = [t for t in transfers if size[t.group] == group_size]
        reckoned = sum(t.num_bytes for t in of_size if t.kind == "all-gather")
        assert reckoned == pytest.approx(sum(c.times * c.result_bytes for c in gathers), rel=1e-3)
        reckoned = sum(t.num_bytes for t in of_size if t.kind != "all-gather")
        assert reckoned == pytest.approx(summed_bytes(collectives_of(layout), group_size), rel=1e-3, abs=1024)


def assert_no_resharding(layout: tuple[int, int], collectives: tuple[Collective, ...], unrolled: bool) -> None:
    """Activations stay with their samples; gradients are summed within a group, then shards of them between groups."""
    params = leaves(step_of(layout))
    assert {c.kind for c in collectives} <= {"all-gather", "all-reduce", "reduce-scatter"}
    if not unrolled:
        once = {(leaf.used, 1) for leaf in params if leaf.sharded and not leaf.path.endswith("input_embedding")}
        batch = 8 * layout[0] // layout[1]  # samples of a group
        rows_and_tokens = ((8, 8, 64 + 1), 1)
        assert set(gathered(collectives, in_loop=False)) <= once | {((batch, 8), 1), rows_and_tokens}
    on_shards, others = (gradient_bytes(layout, unrolled, sharded) for sharded in (True, False))
    rows = 4 * 8 * layout[0] // layout[1] * 8 * 64  # of embedded tokens, which the holders of the table's parts add up
    if layout == SHARDED:
        assert on_shards + others + rows <= summed_bytes(collectives, 8) < on_shards + others + rows + 1024
    else:
        assert on_shards + rows <= summed_bytes(collectives, 4) < on_shards + rows + 1024
        assert on_shards // 4 <= summed_bytes(collectives, 2) < on_shards // 4 + 64
        assert others <= summed_bytes(collectives, 8) < others + 64


def test_two_processes_compute_what_one_does(tmp_path: pathlib.Path) -> None:
    """Two nodes of four devices, sharded within each: 2 x 4 of one process, over a network."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.sharded_step", "4", str(tmp_path / f"{env['RANK']}.npz")],
            cwd=REPO,
            env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for env in cluster_of_two()
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for rank in range(2):
        with np.load(tmp_path / f"{rank}.npz") as file:
            got = dict(file)
        assert_same(float(got.pop("loss")), float(got.pop("grad_norm")), got, step_of((1, 1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_and_tokens_arrive_as_they_were_sent(dtype: str) -> None:
    """The table's gradient by rows, on eight devices, against indexing on one; tokens that fill more than two bytes."""
    table = jax.random.normal(jax.random.key(0), (70_000, 8), dtype)
    tokens = jax.random.randint(jax.random.key(1), (8, 3), 0, 70_000)
    weights = jax.random.normal(jax.random.key(2), (8, 3, 8), dtype)
    mesh = make_mesh(1)
    assert mesh.size == NUM_CPU_DEVICES
    sharded = ShardedLookUp(mesh=mesh, path="table")

    def grad(look_up: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return jax.jit(jax.grad(lambda table, tokens, weights: (look_up(table, tokens) * weights).sum()))

    split = jax.device_put((tokens, weights), batch_sharding(mesh))
    np.testing.assert_array_equal(grad(sharded)(table, *split), grad(plain_look_up)(table, tokens, weights))
