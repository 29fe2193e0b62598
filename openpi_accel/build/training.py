"""TrainConfig -> the step and the state of a run."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from openpi_accel.accel import choose
from openpi_accel.accel.cast import cast_weights_early
from openpi_accel.accel.layers import POLICIES, UnrolledLayers
from openpi_accel.accel.microbatch import accumulated
from openpi_accel.accel.vision import encode_in_one_pass
from openpi_accel.build.sharded import sharded_loss, sharded_ops
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import AUTO, CAMERA_SLOTS, Architecture, TrainConfig
from openpi_accel.data.augment import augment
from openpi_accel.errors import UserError
from openpi_accel.models.freeze import ModuleCount, count_parameters, trainable_predicate
from openpi_accel.models.ops import REFERENCE_OPS, Ops
from openpi_accel.models.pure import bind, init_params
from openpi_accel.models.stack import ScanLayers
from openpi_accel.models.weights import WeightsReport, load_base_params
from openpi_accel.objective import LossFn, draw, make_loss_fn, mean_loss
from openpi_accel.parallel.sharding import MIN_NUM_ELEMENTS
from openpi_accel.train.optimizer import make_optimizer, make_schedule
from openpi_accel.train.start import abstract_state, fresh_state
from openpi_accel.train.step import IsTrainable, Step, ValueAndGrad, make_gradient, make_train_step
from openpi_accel.types import Params, TrainState


def build_ops(config: TrainConfig, acceleration: Acceleration) -> tuple[Ops, tuple[str, ...]]:
    """The model's units, upstream's or the drop-ins that are switched on; and what was decided by measuring.

    Raises:
        UserError: a drop-in that these devices cannot run.
    """
    ops = REFERENCE_OPS
    notes: tuple[str, ...] = ()
    if acceleration.flash_attn:
        gemma, siglip = str(acceleration.flash_impl), str(acceleration.flash_impl)
        if acceleration.flash_impl == "auto":
            choice = choose.fastest(_attention_shapes(config, acceleration), config.model.dtype)
            gemma, siglip, notes = choice.gemma, choice.siglip, (str(choice),)
        elif acceleration.flash_impl == "cudnn" and not choose.cudnn_serves(config.model.dtype):
            raise UserError(
                f"OPENPI_FLASH_IMPL=cudnn needs an NVIDIA GPU and --model.dtype bfloat16; this run has "
                f"{jax.default_backend()} and {config.model.dtype}. Set OPENPI_FLASH_IMPL=xla."
            )
        ops = dataclasses.replace(ops, gemma_attention=choose.GEMMA[gemma], siglip_attention=choose.SIGLIP[siglip])
    if acceleration.batch_cameras:
        ops = dataclasses.replace(ops, encode_cameras=encode_in_one_pass)
    run_layers = UnrolledLayers if acceleration.unroll_layers else ScanLayers
    ops = dataclasses.replace(
        ops,
        gemma_layers=run_layers(POLICIES[config.remat.gemma]),
        siglip_layers=run_layers(POLICIES[config.remat.siglip]),
    )
    return ops, notes


def _attention_shapes(config: TrainConfig, acceleration: Acceleration) -> choose.AttentionShapes:
    arch, length = config.model.architecture, config.model.max_token_len
    assert isinstance(length, int), "the prompt length is fixed before the model is built"
    if acceleration.skip_images == (AUTO,):
        num_cameras = len(config.data.cameras.as_dict()) or len(CAMERA_SLOTS)
    else:
        num_cameras = len(CAMERA_SLOTS) - len(acceleration.skip_images)
    batch = max(1, config.batch_size // jax.device_count())
    suffix = (arch.action_horizon,) if arch.pi05 else (1, arch.action_horizon)
    g, v = arch.paligemma, arch.vision
    return choose.AttentionShapes(
        batch=batch,
        images=batch * (num_cameras if acceleration.batch_cameras else 1),
        blocks=(num_cameras * v.num_tokens + length, *suffix),
        gemma=(g.num_heads, g.num_kv_heads, g.head_dim),
        siglip=(v.num_tokens, v.num_heads, v.width // v.num_heads),
    )


def build_loss(
    arch: Architecture, ops: Ops, acceleration: Acceleration, num_microbatches: int = 1
) -> tuple[LossFn, ValueAndGrad]:
    """The loss of (params, batch with uint8 images, rng), with augmentation, and how its gradient is taken."""
    bind_model = bind(arch, ops)
    if acceleration.cast_early:
        bind_model = cast_weights_early(bind_model, arch.dtype)
    if num_microbatches == 1:
        return make_loss_fn(bind_model, augment), jax.value_and_grad
    return lambda params, drawn, _: mean_loss(bind_model(params), drawn), accumulated(
        functools.partial(draw, augment), num_microbatches
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The functions of a run.

    Attributes:
        step: the pure step.
        abstract: shapes, dtypes and shardings of the state.
        counts: parameters per module.
        settings: what must stay the same on resume.
        train_rng: the run's key.
        notes: what was decided by measuring, a sentence each.
        gradient: what of the step comes before the update: (params, batch, rng of the step) -> loss, gradient.
        loss_fn: (params, batch, rng of the step) -> loss; with microbatches of what is drawn, see `build_loss`.
        make_step: the step, its gradient taken in another way.
        is_trainable: whether a path is trained.
    """

    step: Step
    abstract: TrainState
    counts: list[ModuleCount]
    settings: Mapping[str, Any]
    train_rng: jax.Array
    notes: tuple[str, ...]
    gradient: Callable[..., tuple[jax.Array, Params]]
    loss_fn: LossFn
    make_step: Callable[[ValueAndGrad], Step]
    is_trainable: IsTrainable
    _fresh: Callable[..., TrainState]
    _params_path: str | None

    def fresh_state(self) -> tuple[TrainState, WeightsReport | None]:
        """The state before the first step: base weights where configured, fresh ones elsewhere.

        Raises:
            UserError: the base weights are missing or of another model.
        """
        if self._params_path is None:
            return self._fresh(loaded=None), None
        loaded, report = load_base_params(self._params_path, self.abstract.params, lambda path: "lora" in path)
        return self._fresh(loaded=loaded), report


def build_training(
    config: TrainConfig,
    acceleration: Acceleration,
    mesh: Mesh | AbstractMesh,
    min_num_elements: int = MIN_NUM_ELEMENTS,
    chosen: Ops | None = None,
) -> Training:
    """The step and the state's shapes; computes nothing on a device but keys, and times attention where asked to.

    Args:
        config: the run.
        acceleration: what is switched on.
        mesh: the devices; on an abstract mesh the step cannot run, but the shapes and shardings are there.
        min_num_elements: smaller leaves are replicated.
        chosen: the model's units, in place of those that `build_ops` chooses for these devices.

    Raises:
        UserError: the freeze filter does not fit the model, or a drop-in cannot run on these devices.
    """
    arch = config.model.architecture
    make_params = functools.partial(init_params, arch)
    shapes = jax.eval_shape(make_params, jax.eval_shape(jax.random.key, 0))
    is_trainable: IsTrainable = trainable_predicate(config.freeze, shapes, arch)
    schedule = make_schedule(config.lr_schedule)
    tx: optax.GradientTransformation = make_optimizer(config.optimizer, schedule)
    abstract = abstract_state(make_params, tx, is_trainable, config.ema_decay, mesh, min_num_elements)
    train_rng, init_rng = jax.random.split(jax.random.key(config.seed))
    ops, notes = build_ops(config, acceleration) if chosen is None else (chosen, ())
    ops = sharded_ops(ops, mesh, min_num_elements)
    loss_fn, value_and_grad = build_loss(arch, ops, acceleration, config.num_microbatches)
    loss_fn = sharded_loss(loss_fn, mesh, min_num_elements)
    make_step = functools.partial(make_train_step, loss_fn, tx, schedule, is_trainable, config.ema_decay)
    return Training(
        step=make_step(value_and_grad),
        abstract=abstract,
        counts=count_parameters(shapes, is_trainable),
        settings={
            "ema_decay": config.ema_decay,
            "freeze": config.freeze,
            "seed": config.seed,
            "optimizer": dataclasses.asdict(config.optimizer),
            "lr_schedule": dataclasses.asdict(config.lr_schedule),
        },
        train_rng=train_rng,
        notes=notes,
        gradient=make_gradient(loss_fn, is_trainable, value_and_grad),
        loss_fn=loss_fn,
        make_step=make_step,
        is_trainable=is_trainable,
        _fresh=functools.partial(
            fresh_state, make_params, jax.random.split(init_rng)[1], abstract, tx, is_trainable, config.ema_decay
        ),
        _params_path=config.weight_loader.params_path,
    )
