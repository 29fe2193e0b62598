"""Times the training step on device-resident random data."""

import dataclasses
import gzip
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from openpi_accel import tree
from openpi_accel.build.training import build_training
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import AUTO, CAMERA_SLOTS, IMAGE_SIZE, TrainConfig, WeightLoaderConfig
from openpi_accel.errors import UserError
from openpi_accel.models.flops import sample_flops
from openpi_accel.parallel.mesh import check_batch_size, make_mesh
from openpi_accel.parallel.sharding import batch_sharding
from openpi_accel.sizes import format_bytes
from openpi_accel.train.loop import abstract_batch, compile_ahead
from openpi_accel.train.memory import device_limit, peak_memory_gib, require_memory, step_memory
from openpi_accel.types import Batch, Observation, TrainState

# Dense bfloat16 rates of the vendors' datasheets, FLOP/s per device.
DATASHEET_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
_NOISE = 0.02
# The compiled program, in the folder of a trace: it tells which part of the model a kernel belongs to.
HLO_FILE = "step.hlo.txt.gz"
TRACED_STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchResult:
    """One measurement.

    Attributes:
        samples_per_s, step_s: over all devices; mean over the timed steps.
        peak_memory_gib: highest use of one device, None where the device does not tell.
        mfu: model FLOPs of the executed shapes, without recomputation, over the datasheet's dense bfloat16 rate; None
            where that is unknown.
        compile_s: tracing and compiling the step.
        temporaries_gib: what the compiled step needs beside its arguments.
        losses: of the first and the last timed step.
        log: step, loss, gradient norm, parameter norm and learning rate of every step, the untimed ones too.
        settings: what was run.
    """

    samples_per_s: float
    step_s: float
    peak_memory_gib: float | None
    mfu: float | None
    compile_s: float
    temporaries_gib: float
    losses: tuple[float, float]
    log: Sequence[Mapping[str, float]]
    settings: Mapping[str, Any]


def prompt_length(config: TrainConfig) -> int:
    """The config's prompt length.

    Raises:
        UserError: it is auto, and there is no data to take it from.
    """
    if not isinstance(config.model.max_token_len, int):
        raise UserError("there is no data to take the prompt length from: give --model.max-token-len 28, for example.")
    return config.model.max_token_len


def random_batch(config: TrainConfig, skip_images: tuple[str, ...], seed: int = 0) -> Batch:
    """A batch of the config's shapes: random pixels, prompts of random length, normal actions. Numpy arrays."""
    rng = np.random.default_rng(seed)
    model, size, length = config.model, config.batch_size, prompt_length(config)
    fed = config.data.cameras.as_dict() or dict.fromkeys(CAMERA_SLOTS[:2], "")
    slots = [s for s in CAMERA_SLOTS if (s in fed if skip_images == (AUTO,) else s not in skip_images)]
    shape = (size, IMAGE_SIZE, IMAGE_SIZE, 3)
    lengths = rng.integers(max(1, length // 2), length + 1, size)
    mask = np.arange(length)[None] < lengths[:, None]
    observation = Observation(
        images={s: rng.integers(0, 256, shape, np.uint8) if s in fed else np.zeros(shape, np.uint8) for s in slots},  # type: ignore[misc]
        image_masks={s: np.full(size, s in fed) for s in slots},  # type: ignore[misc]
        state=rng.standard_normal((size, model.action_dim), np.float32),  # type: ignore[arg-type]
        tokenized_prompt=(rng.integers(0, model.vocab_size, mask.shape) * mask).astype(np.int32),  # type: ignore[arg-type]
        tokenized_prompt_mask=mask,  # type: ignore[arg-type]
    )
    actions = rng.standard_normal((size, model.action_horizon, model.action_dim), np.float32)
    return Batch(observation=observation, actions=actions)  # type: ignore[arg-type]


def shaken(state: TrainState) -> TrainState:
    """Every parameter moved by 0.02 times normal noise: zero-initialised gates and norms would cut the network."""

    def shake(state: TrainState, key: jax.Array) -> TrainState:
        flat = tree.flatten(state.params)
        keys = jax.random.split(key, len(flat))
        params = tree.unflatten(
            {
                path: leaf + (_NOISE * jax.random.normal(k, leaf.shape, jnp.float32)).astype(leaf.dtype)
                for k, (path, leaf) in zip(keys, flat.items(), strict=True)
            }
        )
        ema = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
        return dataclasses.replace(state, params=params, ema_params=ema)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(shake, donate_argnums=0, out_shardings=shardings)(state, jax.random.key(1))


def measure(
    config: TrainConfig,
    acceleration: Acceleration,
    *,
    num_steps: int,
    num_warmup_steps: int = 3,
    trace_dir: str | None = None,
    memory_limit: int | None = None,
) -> BenchResult:
    """Compiles the step of this config and times it.

    Args:
        config: with a fixed prompt length.
        acceleration: what is switched on.
        num_steps: timed steps, at least 1.
        num_warmup_steps: untimed steps before them.
        trace_dir: write a profiler trace of two further steps there.
        memory_limit: bytes that a device gives; None asks the device.

    Raises:
        UserError: the step does not fit the devices, the prompt length is auto, or the batch does not divide over them.
    """
    mesh = make_mesh(config.fsdp_devices)
    check_batch_size(config.batch_size, mesh.size, jax.process_count())
    # Weights do not matter to speed, and public ones need not be on this machine.
    config = dataclasses.replace(config, weight_loader=WeightLoaderConfig())
    training = build_training(config, acceleration, mesh)
    host_batch = random_batch(config, acceleration.skip_images)
    start = time.perf_counter()
    shapes = abstract_batch(host_batch, config.batch_size, mesh)
    compiled = compile_ahead(training.step, mesh, training.abstract, shapes, training.train_rng)
    compile_s = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assert memory is not None
    temporaries_gib = memory.temp_size_in_bytes / 2**30
    print(
        f"compiled in {compile_s:.1f} s, temporaries {format_bytes(memory.temp_size_in_bytes)}",
        *training.notes,
        file=sys.stderr,
    )
    need = step_memory(compiled)
    assert need is not None
    require_memory(
        need,
        device_limit(jax.local_devices()[0]) if memory_limit is None else memory_limit,
        batch_size=config.batch_size,
        num_microbatches=config.num_microbatches,
        fsdp_devices=config.fsdp_devices,
        num_devices=mesh.size,
    )
    batch = jax.device_put(host_batch, batch_sharding(mesh))
    state, _ = training.fresh_state()
    state = shaken(state)
    log: list[Mapping[str, jax.Array]] = []
    for index in range(num_warmup_steps + num_steps):
        if index == num_warmup_steps:
            jax.block_until_ready(state)
            start = time.perf_counter()
        state, metrics = compiled(state, batch, training.train_rng)
        log.append(metrics)
    jax.block_until_ready(state)
    step_s = (time.perf_counter() - start) / num_steps
    rows = [{"step": i} | {name: float(value) for name, value in metrics.items()} for i, metrics in enumerate(log)]
    if trace_dir is not None:
        with jax.profiler.trace(trace_dir, create_perfetto_trace=True):
            for _ in range(TRACED_STEPS):
                state, metrics = compiled(state, batch, training.train_rng)
            jax.block_until_ready(state)
        with gzip.open(pathlib.Path(trace_dir) / HLO_FILE, "wt") as file:
            file.write(compiled.as_text() or "")
    return BenchResult(
        samples_per_s=config.batch_size / step_s,
        step_s=step_s,
        peak_memory_gib=peak_memory_gib().get("device_memory_peak_gib"),
        mfu=_mfu(config, len(host_batch.observation.images), step_s),
        compile_s=compile_s,
        temporaries_gib=temporaries_gib,
        losses=(rows[num_warmup_steps]["loss"], rows[-1]["loss"]),
        log=rows,
        settings={
            "config": config.name,
            "batch_size": config.batch_size,
            "cameras": list(host_batch.observation.images),
            "prompt_tokens": config.model.max_token_len,
            "action_horizon": config.model.action_horizon,
            "dtype": config.model.dtype,
            "ema": config.ema_decay is not None,
            "freeze": config.freeze,
            "remat": dataclasses.asdict(config.remat),
            "fsdp_devices": config.fsdp_devices,
            "acceleration": dataclasses.asdict(acceleration),
            "num_steps": num_steps,
            "notes": list(training.notes),
            "num_devices": jax.device_count(),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
        },
    )


def _mfu(config: TrainConfig, num_cameras: int, step_s: float) -> float | None:
    kind = jax.devices()[0].device_kind
    rate = next((flops for name, flops in DATASHEET_FLOPS.items() if name in kind), None)
    if rate is None:
        return None
    flops = sample_flops(config.model.architecture, num_cameras, prompt_length(config)).total
    return flops * config.batch_size / step_s / (rate * jax.device_count())
