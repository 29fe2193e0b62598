"""TrainConfig -> the step and the state of a run."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from openpi_accel.accel import attention
from openpi_accel.accel.cast import cast_weights_early
from openpi_accel.accel.layers import ScannedLayers, UnrolledLayers
from openpi_accel.accel.vision import encode_in_one_pass
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import Architecture, TrainConfig
from openpi_accel.data.augment import augment
from openpi_accel.errors import UserError
from openpi_accel.models.freeze import ModuleCount, count_parameters, trainable_predicate
from openpi_accel.models.ops import REFERENCE_OPS, Ops
from openpi_accel.models.pure import bind, init_params
from openpi_accel.models.weights import WeightsReport, load_base_params
from openpi_accel.objective import LossFn, make_loss_fn
from openpi_accel.train.optimizer import make_optimizer, make_schedule
from openpi_accel.train.start import abstract_state, fresh_state
from openpi_accel.train.step import IsTrainable, Step, make_train_step
from openpi_accel.types import TrainState


def build_ops(config: TrainConfig, acceleration: Acceleration) -> Ops:
    """The model's units: upstream's, or the drop-ins that are switched on.

    Raises:
        UserError: a drop-in that these devices cannot run.
    """
    cudnn = acceleration.flash_attn and acceleration.flash_impl == "cudnn"
    if cudnn and (jax.default_backend() != "gpu" or config.model.dtype != "bfloat16"):
        raise UserError(
            f"OPENPI_FLASH_IMPL=cudnn needs an NVIDIA GPU and --model.dtype bfloat16; this run has "
            f"{jax.default_backend()} and {config.model.dtype}. Set OPENPI_FLASH_IMPL=xla."
        )
    ops = REFERENCE_OPS
    if acceleration.flash_attn:
        ops = dataclasses.replace(
            ops,
            gemma_attention=attention.gemma_attention_cudnn if cudnn else attention.gemma_attention_xla,
            siglip_attention=attention.siglip_attention_cudnn if cudnn else attention.siglip_attention_xla,
        )
    if acceleration.batch_cameras:
        ops = dataclasses.replace(ops, encode_cameras=encode_in_one_pass)
    run_layers = UnrolledLayers if acceleration.unroll_layers else ScannedLayers
    return dataclasses.replace(
        ops, gemma_layers=run_layers(config.remat.gemma), siglip_layers=run_layers(config.remat.siglip)
    )


def build_loss(arch: Architecture, ops: Ops, acceleration: Acceleration) -> LossFn:
    """(params, batch with uint8 images, rng) -> scalar loss, with augmentation."""
    bind_model = bind(arch, ops)
    if acceleration.cast_early:
        bind_model = cast_weights_early(bind_model, arch.dtype)
    return make_loss_fn(bind_model, augment)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The functions of a run.

    Attributes:
        step: the pure step.
        abstract: shapes, dtypes and shardings of the state.
        counts: parameters per module.
        settings: what must stay the same on resume.
        train_rng: the run's key.
    """

    step: Step
    abstract: TrainState
    counts: list[ModuleCount]
    settings: Mapping[str, Any]
    train_rng: jax.Array
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


def build_training(config: TrainConfig, acceleration: Acceleration, mesh: Mesh) -> Training:
    """The step and the state's shapes; computes nothing on a device but keys.

    Raises:
        UserError: the freeze filter does not fit the model.
    """
    arch = config.model.architecture
    make_params = functools.partial(init_params, arch)
    shapes = jax.eval_shape(make_params, jax.eval_shape(jax.random.key, 0))
    is_trainable: IsTrainable = trainable_predicate(config.freeze, shapes, arch)
    schedule = make_schedule(config.lr_schedule)
    tx: optax.GradientTransformation = make_optimizer(config.optimizer, schedule)
    abstract = abstract_state(make_params, tx, is_trainable, config.ema_decay, mesh)
    train_rng, init_rng = jax.random.split(jax.random.key(config.seed))
    return Training(
        step=make_train_step(
            build_loss(arch, build_ops(config, acceleration), acceleration),
            tx,
            schedule,
            is_trainable,
            config.ema_decay,
        ),
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
        _fresh=functools.partial(
            fresh_state, make_params, jax.random.split(init_rng)[1], abstract, tx, is_trainable, config.ema_decay
        ),
        _params_path=config.weight_loader.params_path,
    )
