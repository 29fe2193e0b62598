"""The memory planner: lifetimes on small programs, the step against the compiler's account of real GPUs, the search."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from openpi_accel.config.flags import Acceleration
from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import RematConfig, TrainConfig
from openpi_accel.errors import UserError
from openpi_accel.tools.plan import command
from openpi_accel.tools.plan.liveness import Timeline, timeline
from openpi_accel.tools.plan.predict import footprint, same_trace
from openpi_accel.tools.plan.program import flatten
from openpi_accel.tools.plan.search import Planner
from openpi_accel.tools.plan.sharded import spread

GIB, MIB = 2**30, 2**20
# Float32, 4 MiB.
SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
OPT = Acceleration(
    skip_images=("right_wrist_0_rgb",),
    flash_attn=True,
    flash_impl="auto",
    batch_cameras=True,
    cast_early=True,
    unroll_layers=True,
)
LIBERO = dataclasses.replace(
    get_preset("pi05_libero"), model=dataclasses.replace(get_preset("pi05_libero").model, max_token_len=28)
)
DOTS = RematConfig(gemma="dots", siglip="dots")
# Small enough to be planned in a second: 2 layers, 4 tokens an image.
DEMO = dataclasses.replace(
    get_preset("pi05_demo"), model=dataclasses.replace(get_preset("pi05_demo").model, max_token_len=16)
)
TINY_MODEL = {"vision_variant": "tiny", "paligemma_variant": "tiny", "action_expert_variant": "tiny_expert"}


def lived(function: object, *shapes: jax.ShapeDtypeStruct, **settings: object) -> Timeline:
    program = flatten(jax.make_jaxpr(function)(*shapes))  # type: ignore[arg-type]
    settings = {"free": (), "sharded": spread(program, program.inputs[: settings.pop("num_sharded", 0)])} | settings
    return timeline(program, **settings)  # type: ignore[arg-type]


def peak_mib(function: object, *shapes: jax.ShapeDtypeStruct) -> float:
    return lived(function, *shapes).whole.max(initial=0) / MIB


def test_what_is_read_element_by_element_gets_no_buffer() -> None:
    assert peak_mib(lambda x: jnp.sum(jnp.exp(jnp.sin(x) + 1)), SQUARE) == 0
    assert peak_mib(lambda x: jnp.exp(x) @ x, SQUARE) == 8  # a product reads a finished buffer, and writes one
    assert peak_mib(lambda x: jnp.sum(x @ x), SQUARE) == 4
    assert peak_mib(lambda x: (x @ x, None)[1], SQUARE) == 0  # dead


def test_a_product_that_waits_for_its_last_reader_is_counted_until_then() -> None:
    def chain(x: jax.Array) -> jax.Array:
        first = x @ x
        y = first
        for _ in range(3):
            y = y @ x
        return jnp.sum(y * first)

    def without(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(4):
            y = y @ x
        return jnp.sum(y)

    assert peak_mib(chain, SQUARE) == 12
    assert peak_mib(without, SQUARE) == 8


def test_recomputation_keeps_layer_inputs_alone() -> None:
    def loss(x: jax.Array, remat: bool) -> jax.Array:
        def layer(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ jnp.tanh(x @ x))

        for _ in range(6):
            x = (jax.checkpoint(layer) if remat else layer)(x)
        return jnp.sum(x)

    kept = peak_mib(lambda x: jax.grad(loss)(x, False), SQUARE)
    recomputed = peak_mib(lambda x: jax.grad(loss)(x, True), SQUARE)
    assert kept >= 6 * 2 * 4 and recomputed < 0.75 * kept


def test_a_loop_holds_its_stacks_and_one_step() -> None:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), w, length=10)[0])

    forward = peak_mib(loss, SQUARE)
    backward = peak_mib(jax.grad(loss), SQUARE)
    assert forward <= 12 and backward >= 10 * 2 * 4 and backward <= forward + 10 * 2 * 4 + 16


def test_an_update_overwrites_what_it_updates() -> None:
    program = flatten(jax.make_jaxpr(lambda w: (2 * w, w @ w, jnp.sin(w)))(SQUARE))
    nothing = spread(program, ())
    peaks = [timeline(program, free=program.outputs[:n], sharded=nothing).whole.max() / MIB for n in range(4)]
    assert peaks == [12, 8, 4, 0]


def test_sharded_parameters_are_gathered_one_at_a_time() -> None:
    def step(ws: jax.Array, x: jax.Array) -> jax.Array:
        cast = ws.astype(jnp.bfloat16)
        for w in cast:
            x = x @ w
        return jnp.sum(x)

    ws, x = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    one = lived(step, ws, x, num_sharded=1)
    assert one.sharded.max() >= 8 * 2 * MIB  # the cast stack
    assert one.gathered.max() == 2 * MIB  # a layer of it
    assert lived(step, ws, x).sharded.max() == 0


# H200, pi05_libero, 2 cameras; docs/performance.md and docs/scaling.md have the commands. GiB of each device that the
# compiled step needs.
@pytest.mark.parametrize(
    ("acceleration", "remat", "tokens", "batch", "num_microbatches", "fsdp_devices", "seen_gib"),
    [
        (OPT, DOTS, 28, 48, 1, 1, 108.6),  # one GPU; two, data parallel: 108.4
        (OPT, DOTS, 28, 32, 1, 1, 92.5),  # two, data parallel
        (OPT, DOTS, 28, 64, 1, 1, 125.9),
        (OPT, DOTS, 28, 48, 1, 2, 83.4),
        (OPT, DOTS, 28, 64, 1, 2, 100.7),
        (OPT, DOTS, 28, 72, 1, 2, 109.4),
        (OPT, DOTS, 36, 39, 1, 2, 74.8),
        pytest.param(OPT, DOTS, 36, 78, 2, 1, 112.3, marks=pytest.mark.long),
        pytest.param(
            dataclasses.replace(OPT, unroll_layers=False),
            RematConfig(gemma="dots"),
            28,
            48,
            1,
            1,
            101.6,
            marks=pytest.mark.long,
        ),
        (Acceleration(skip_images=("right_wrist_0_rgb",)), RematConfig(), 28, 32, 1, 1, 65.8),
    ],
)
def test_full_size_steps_are_predicted_within_5_per_cent(
    acceleration: Acceleration,
    remat: RematConfig,
    tokens: int,
    batch: int,
    num_microbatches: int,
    fsdp_devices: int,
    seen_gib: float,
) -> None:
    model = dataclasses.replace(LIBERO.model, max_token_len=tokens)
    config = dataclasses.replace(LIBERO, remat=remat, model=model, num_microbatches=num_microbatches)
    need = footprint(same_trace(config), acceleration).memory(batch, num_microbatches, fsdp_devices)
    assert need.state / GIB == pytest.approx(49.98 / fsdp_devices, abs=0.04)
    assert need.total / GIB == pytest.approx(seen_gib, rel=0.05)


@pytest.mark.long
def test_sharding_adapters_and_microbatches_save_memory() -> None:
    scanned = dataclasses.replace(OPT, unroll_layers=False)
    whole = footprint(same_trace(LIBERO), scanned)
    one, eight = whole.memory(32, 1, 1), whole.memory(32, 1, 8)
    assert eight.state == pytest.approx(one.state / 8, rel=0.01)
    assert eight.temporaries < one.temporaries
    kept = dataclasses.replace(LIBERO, remat=RematConfig(gemma="dots"))
    parts = footprint(same_trace(dataclasses.replace(kept, num_microbatches=8, batch_size=64)), scanned)
    assert parts.memory(64, 8, 1).temporaries < footprint(same_trace(kept), scanned).memory(64, 1, 1).temporaries
    planner = Planner(acceleration=scanned, num_devices=1, limit=0)
    adapters = command.with_adapters(LIBERO)
    assert adapters is not None and planner.plan(adapters, LIBERO).need.state < 0.3 * one.state
    assert command.with_adapters(adapters) is None


def limited(config: TrainConfig, fraction: float, num_devices: int = 1) -> tuple[Planner, command.Answer]:
    """A plan for cards of which the config needs 1 / fraction."""
    free = Planner(acceleration=OPT, num_devices=num_devices, limit=0)
    limit = int(free.plan(config, config).need.total * fraction)
    planner = dataclasses.replace(free, limit=limit)
    return planner, command.answer(config, OPT, num_devices, "card", limit / GIB, 1.0)


def test_the_nearest_setting_fits_and_changes_as_little_as_it_can() -> None:
    model = dataclasses.replace(DEMO.model, **TINY_MODEL)  # type: ignore[arg-type]
    config = dataclasses.replace(DEMO, model=model, remat=DOTS, batch_size=64)
    _, roomy = limited(config, 1.1)
    assert roomy.fits and roomy.same_numbers == roomy.asked and roomy.asked.options == ()
    planner, tight = limited(config, 0.8)
    assert not tight.fits and tight.same_numbers is not None and planner.fits(tight.same_numbers)
    assert tight.same_numbers.config.batch_size == 64 and tight.same_numbers.options
    assert tight.same_numbers.recomputed == 0 and tight.smaller_batch is None
    planner, none = limited(config, 0.001)
    assert none.same_numbers is none.smaller_batch is none.without_average is none.adapters is None


def test_the_largest_batch_is_the_last_that_fits() -> None:
    config = dataclasses.replace(DEMO, batch_size=64)
    planner, _ = limited(config, 0.6)
    largest = planner.largest_batch(config, config)
    assert largest is not None and planner.fits(largest) and 1 < largest.config.batch_size < 64
    assert largest.options == (f"--batch-size {largest.config.batch_size}",)
    more = dataclasses.replace(config, batch_size=largest.config.batch_size + 1)
    assert not planner.fits(planner.plan(more, config))


ARGUMENTS = ["pi05_demo", "--model.max-token-len", "16", "--batch-size", "64"]
# 256 tokens an image, so that layers weigh more than images.
TINY = ["--model.vision-variant", "tiny", "--model.paligemma-variant", "tiny"]
TINY += ["--model.action-expert-variant", "tiny_expert"]


def test_the_command_answers_for_every_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*ARGUMENTS, "--gpus", "4", "--json"], {}) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [one["gpu_memory_gib"] for one in answers] == [24, 48, 80, 96, 139.8] and all(one["fits"] for one in answers)
    assert answers[0]["asked"]["batch_per_gpu"] == 16 and answers[0]["usable_gib"] == pytest.approx(24 * 0.95)
    assert command.main([*ARGUMENTS, "--gpu-memory-gib", "0.05"], {}) == 1
    text = capsys.readouterr().out
    assert "0.05 GiB: does not fit as it is" in text and "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in text


def test_run_opts_settings_are_planned_unless_the_user_says_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    needs = {}
    for name, extra, env in (
        ("opt", [], {}),
        ("baseline", ["--baseline"], {}),
        ("none", ["--remat.gemma", "none", "--remat.siglip", "none"], {}),
        ("one camera", [], {"OPENPI_SKIP_IMAGES": "right_wrist_0_rgb,left_wrist_0_rgb"}),
    ):
        # A card that no state fits: what is asked about is predicted, and nothing else need be traced.
        command.main([*ARGUMENTS, *TINY, "--gpu-memory-gib", "0.001", "--json", *extra], env)
        needs[name] = json.loads(capsys.readouterr().out)[0]["asked"]["temporaries_gib"]
    assert needs["baseline"] != needs["opt"] < needs["none"] and needs["one camera"] < needs["opt"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--gpus", "0"], "--gpus must be"),
        (["--gpus", "3"], "--batch-size"),
        (["--gpus", "4", "--fsdp-devices", "3"], "does not divide --gpus 4"),
        (["--memory-fraction", "1.5"], "--memory-fraction"),
    ],
)
def test_mistakes_are_told(extra: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        command.main([*ARGUMENTS, *extra], {})
