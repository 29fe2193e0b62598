"""Every row of accel/catalog.py against the reference: the loss and every gradient, float32, shaken weights.

No augmentation: it is drawn before anything here differs. Two layers per tower, so that the last one, whose prefix
feeds nothing, has one before it.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_accel import tree
from openpi_accel.accel import attention, choose
from openpi_accel.accel.cast import cast_weights_early
from openpi_accel.accel.catalog import CATALOG, Entry, set_options, switched_on
from openpi_accel.accel.microbatch import accumulated
from openpi_accel.build.training import build_ops
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import CAMERA_SLOTS, Architecture, TrainConfig
from openpi_accel.data.augment import to_float
from openpi_accel.errors import UserError
from openpi_accel.models.attention import gemma_attention, split_tokens
from openpi_accel.models.ops import Ops
from openpi_accel.models.pure import bind
from openpi_accel.objective import draw, make_loss_fn, mean_loss
from openpi_accel.train.optimizer import make_optimizer, make_schedule
from openpi_accel.train.step import init_state, make_train_step
from openpi_accel.types import Batch, Observation, Params
from tests.tiny import tiny_config

GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "data" / "goldens"
NUM_LAYERS, HORIZON, BATCH = 2, 10, 2
CONFIG = tiny_config(action_horizon=HORIZON, batch_size=BATCH)
# Compiling is most of the time; the arithmetic is float32 all the same.
QUICK = {"xla_backend_optimization_level": 0}
GPU_ALONE = ("attention_cudnn",)
ON_CPU = [entry for entry in CATALOG if entry.name not in GPU_ALONE]
# The key of a SigLIP layer's bias shifts every logit of a row alike: its exact gradient is 0.
ZERO_GRADIENT = "MultiHeadDotProductAttention_0/key/bias"


def shallow(arch: Architecture) -> Architecture:
    """Two Gemma layers; the tiny vision tower has two."""
    experts = {n: dataclasses.replace(getattr(arch, n), depth=NUM_LAYERS) for n in ("paligemma", "action_expert")}
    return dataclasses.replace(arch, **experts)


ARCH = shallow(CONFIG.model.architecture)


@pytest.fixture(scope="module")
def params() -> Params:
    """The goldens' tiny parameters: every leaf was shaken by 0.02 times normal noise."""
    with np.load(GOLDENS / "pi05_tiny.params.npz") as file:
        flat = {name.removeprefix("params/"): file[name] for name in file.files if name.startswith("params/")}
    return tree.unflatten({path: leaf[:NUM_LAYERS] if "/layers/" in path else leaf for path, leaf in flat.items()})


def batch_of(skip_images: tuple[str, ...] = ()) -> Batch:
    """Two cameras that exist and one that does not."""
    rng = np.random.default_rng(0)
    shape = (BATCH, 224, 224, 3)
    images = {slot: rng.integers(0, 256, shape, np.uint8) for slot in CAMERA_SLOTS[:2]}
    images[CAMERA_SLOTS[2]] = np.zeros(shape, np.uint8)
    masks = {slot: np.full(BATCH, slot != CAMERA_SLOTS[2]) for slot in CAMERA_SLOTS}
    prompt_mask = np.arange(8)[None] < np.array([[5], [8]])
    observation = Observation(
        images={slot: jnp.asarray(image) for slot, image in images.items() if slot not in skip_images},
        image_masks={slot: jnp.asarray(mask) for slot, mask in masks.items() if slot not in skip_images},
        state=jnp.asarray(rng.standard_normal((BATCH, 32), np.float32)),
        tokenized_prompt=jnp.asarray((rng.integers(0, 512, (BATCH, 8)) * prompt_mask).astype(np.int32)),
        tokenized_prompt_mask=jnp.asarray(prompt_mask),
    )
    return Batch(observation=observation, actions=jnp.asarray(rng.standard_normal((BATCH, HORIZON, 32), np.float32)))


def without_augmentation(_: jax.Array, images: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return to_float(images)


def loss_and_how(config: TrainConfig, acceleration: Acceleration, ops: Ops | None = None) -> tuple[Any, Any]:
    """As build.training does it, on the shallow model and without augmentation."""
    bind_model = bind(ARCH, ops or build_ops(config, acceleration)[0])
    if acceleration.cast_early:
        bind_model = cast_weights_early(bind_model, ARCH.dtype)
    if config.num_microbatches == 1:
        return make_loss_fn(bind_model, without_augmentation), jax.value_and_grad
    return lambda params, drawn, _: mean_loss(bind_model(params), drawn), accumulated(
        functools.partial(draw, without_augmentation), config.num_microbatches
    )


def loss_and_gradients(
    params: Params, config: TrainConfig, acceleration: Acceleration, ops: Ops | None = None
) -> tuple[float, dict[str, np.ndarray]]:
    loss_fn, value_and_grad = loss_and_how(config, acceleration, ops)
    run = jax.jit(value_and_grad(loss_fn), compiler_options=QUICK)
    loss, grads = run(params, batch_of(acceleration.skip_images), jax.random.key(7))
    return float(loss), {path: np.asarray(leaf) for path, leaf in tree.flatten(grads).items()}


@pytest.fixture(scope="module")
def reference(params: Params) -> tuple[float, dict[str, np.ndarray]]:
    """Upstream's arithmetic."""
    return loss_and_gradients(params, CONFIG, Acceleration())


def largest_difference(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> tuple[float, str]:
    """Over all leaves: max |a - b| / max |b|, and which leaf; leaves that are 0 in exact arithmetic absolutely."""
    assert list(got) == list(want)
    differences = {}
    for path, b in want.items():
        scale = float(np.abs(b).max())
        difference = float(np.abs(got[path] - b).max())
        differences[path] = difference if scale < 1e-8 or path.endswith(ZERO_GRADIENT) else difference / scale
    worst = max(differences, key=differences.__getitem__)
    return differences[worst], worst


@pytest.mark.parametrize("entry", ON_CPU, ids=lambda entry: entry.name)
def test_each_row_within_its_contract(entry: Entry, params: Params, reference: Any) -> None:
    loss, grads = loss_and_gradients(params, *switched_on(entry, CONFIG, Acceleration()))
    assert abs(loss - reference[0]) <= entry.bound * abs(reference[0])
    difference, path = largest_difference(grads, reference[1])
    assert difference <= entry.bound, f"{path} differs by {difference:.1e}"


def all_on() -> tuple[TrainConfig, Acceleration]:
    """What run_opt.sh turns on."""
    config, acceleration = CONFIG, Acceleration()
    for entry in CATALOG:
        if entry.in_opt:
            config, acceleration = switched_on(entry, config, acceleration)
    return config, acceleration


def test_all_on_against_all_off(params: Params, reference: Any) -> None:
    loss, grads = loss_and_gradients(params, *all_on())
    assert abs(loss - reference[0]) <= 2e-5 * abs(reference[0])
    difference, path = largest_difference(grads, reference[1])
    assert difference <= 5e-5, f"{path} differs by {difference:.1e}"


def test_twenty_steps(params: Params) -> None:
    """All on against all off: the learning rate to the bit, the loss throughout."""
    config = set_options(CONFIG, {"lr_schedule.peak_lr": 1e-3, "lr_schedule.warmup_steps": 3})
    curves = []
    for settings in (
        (config, Acceleration()),
        (set_options(all_on()[0], {"lr_schedule": config.lr_schedule}), all_on()[1]),
    ):
        loss_fn, value_and_grad = loss_and_how(*settings)
        schedule = make_schedule(config.lr_schedule)
        tx = make_optimizer(config.optimizer, schedule)
        step = jax.jit(make_train_step(loss_fn, tx, schedule, lambda path: True, 0.9, value_and_grad))
        state = init_state(jax.tree.map(jnp.asarray, params), tx, lambda path: True, 0.9)
        batch, rows = batch_of(settings[1].skip_images), []
        for _ in range(20):
            state, metrics = step(state, batch, jax.random.key(42))
            rows.append({name: float(value) for name, value in metrics.items()})
        assert step._cache_size() == 1
        curves.append(rows)
    off, fast = curves
    assert [row["learning_rate"] for row in fast] == [row["learning_rate"] for row in off]
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(fast, off, strict=True)]
    assert max(differences) < 1e-4
    assert off[-1]["loss"] != off[0]["loss"]


def test_a_broken_attention_is_noticed(params: Params, reference: Any) -> None:
    """The prompt hidden from the prefix alone: the smallest fault that a wrong block structure would make."""
    ops = build_ops(CONFIG, Acceleration(flash_attn=True))[0]

    def broken(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> Any:
        return attention.gemma_attention_xla(
            q, k, v, dataclasses.replace(mask, blocks=(mask.blocks[0] - 8, 8, *mask.blocks[1:]))
        )

    loss, grads = loss_and_gradients(params, CONFIG, Acceleration(), dataclasses.replace(ops, gemma_attention=broken))
    assert abs(loss - reference[0]) > 1e-5 * abs(reference[0])
    assert largest_difference(grads, reference[1])[0] > 1e-2


def test_names_are_unique_and_the_gpu_rows_known() -> None:
    names = [entry.name for entry in CATALOG]
    assert len(set(names)) == len(names)
    assert set(GPU_ALONE) < set(names)
    for entry in CATALOG:
        read = Acceleration.from_env(entry.environment)
        assert {name: getattr(read, name) for name in entry.fields} == dict(entry.fields)
        assert bool(entry.arguments) == bool(entry.options)


def test_what_the_device_cannot_serve_is_an_error() -> None:
    with pytest.raises(UserError, match="OPENPI_FLASH_IMPL=cudnn needs an NVIDIA GPU"):
        build_ops(CONFIG, Acceleration(flash_attn=True, flash_impl="cudnn"))


def test_auto_without_a_choice_says_so() -> None:
    notes = build_ops(CONFIG, Acceleration(flash_attn=True, flash_impl="auto"))[1]
    assert len(notes) == 1 and "took xla, the only one" in notes[0]


def test_auto_measures_and_takes_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel beside the reference that is slower for one tower, and one that is faster for the other."""
    monkeypatch.setattr(choose, "cudnn_serves", lambda dtype: True)

    def slow(q: jax.Array, k: jax.Array, v: jax.Array, *mask: Any) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jnp.sin(x), None), jnp.tile(q, (1, 4, 1, 1)), length=60)[0]

    def fast(q: jax.Array, k: jax.Array, v: jax.Array, *mask: Any) -> jax.Array:
        return q + k + v

    monkeypatch.setattr(choose, "GEMMA", {"xla": choose.GEMMA["xla"], "cudnn": slow})
    monkeypatch.setattr(choose, "SIGLIP", {"xla": choose.SIGLIP["xla"], "cudnn": fast})
    shapes = choose.AttentionShapes(batch=2, images=2, blocks=(64, 8), gemma=(4, 1, 16), siglip=(64, 4, 16))
    choice = choose.fastest(shapes, "float32")
    assert (choice.gemma, choice.siglip) == ("xla", "cudnn")
    assert "Gemma xla" in str(choice) and "-> cudnn" in str(choice)


@pytest.mark.parametrize("num_kv", [1, 2])
def test_attention_alone(num_kv: int) -> None:
    """Grouped heads, padding inside the prefix, three blocks, cached keys."""
    assert _attention_difference(choose.GEMMA["xla"], num_kv, num_cached=79) < 1e-5


def test_the_cudnn_path_around_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Valid keys first and their number per sample: on the CPU by JAX's own kernel, which takes the same arguments."""
    kernel = jax.nn.dot_product_attention

    def on_cpu(*args: jax.Array, implementation: str, **more: jax.Array) -> jax.Array:
        assert implementation == "cudnn"
        return kernel(*args, implementation="xla", **more)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_cpu)
    assert _attention_difference(choose.GEMMA["cudnn"], num_kv=1, num_cached=0) < 1e-5


def _attention_difference(attend: Any, num_kv: int, num_cached: int) -> float:
    """The largest of value and gradients of valid tokens, relative to the reference.

    Blocks of 79, 1 and 10 tokens, with padding in the first.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, (2, length, heads, 16))
        for key, length, heads in zip(keys, (90 - num_cached, 90, 90), (4, num_kv, num_kv), strict=False)
    )
    valid = jnp.ones((2, 90), bool).at[0, 10:14].set(False).at[1, 60:79].set(False)
    mask = attention.AttentionMask(valid=valid, blocks=(79, 1, 10), num_queries=q.shape[1])
    weights = jax.random.normal(keys[3], q.shape) * valid[:, -q.shape[1] :, None, None]

    def summed(attend: Any) -> Any:
        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(split_tokens(attend(q, k, v, mask), [q.shape[1]])[0] * weights)

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))

    (want, want_grads), (got, got_grads) = summed(gemma_attention)(q, k, v), summed(attend)(q, k, v)
    pairs = [(got, want), *zip(got_grads, want_grads, strict=True)]
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
