"""The composition root: configuration values -> the concrete functions and objects of a run."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from openpi_accel.accel import attention
from openpi_accel.accel.cast import cast_weights_early
from openpi_accel.accel.layers import ScannedLayers, UnrolledLayers
from openpi_accel.accel.vision import encode_in_one_pass
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import Architecture, TrainConfig
from openpi_accel.data.augment import augment
from openpi_accel.data.lerobot.dataset import open_dataset
from openpi_accel.data.lerobot.locate import find_dataset
from openpi_accel.data.loader import Loader
from openpi_accel.data.mapping import resolve_mapping
from openpi_accel.data.norm_stats import load_norm_stats, norm_stats_path
from openpi_accel.data.pipeline import BatchSource, settle_max_token_len
from openpi_accel.data.rows import rows_of_episodes
from openpi_accel.data.stats_command import stats_command
from openpi_accel.data.tokenizer import PromptTokenizer, find_tokenizer
from openpi_accel.data.validation import DataReport, validate_before_training
from openpi_accel.errors import UserError
from openpi_accel.models.freeze import ModuleCount, count_parameters, trainable_predicate
from openpi_accel.models.ops import REFERENCE_OPS, Ops
from openpi_accel.models.pure import bind, init_params
from openpi_accel.models.weights import WeightsReport, load_base_params
from openpi_accel.objective import LossFn, make_loss_fn
from openpi_accel.train.optimizer import make_optimizer, make_schedule
from openpi_accel.train.start import abstract_state, fresh_state
from openpi_accel.train.step import IsTrainable, Step, make_train_step
from openpi_accel.types import Batch, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a run, checked.

    Attributes:
        config: the run's config with everything that the data decides filled in.
        source: makes batches of dataset rows.
        rows: the rows that training draws from.
        report: what the check before training found.
        norm_stats_text: the statistics file, to be stored with the checkpoints.
    """

    config: TrainConfig
    source: BatchSource
    rows: np.ndarray
    report: DataReport
    norm_stats_text: str

    def loader(self, *, start_sample: int = 0) -> Loader[Batch]:
        """This process's share of the batches, from a position on."""
        return Loader(
            lambda ids: self.source.load_batch(self.rows[ids]),
            num_rows=len(self.rows),
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            num_workers=self.config.num_workers,
            prefetch_batches=self.config.data.prefetch_batches,
            start_sample=start_sample,
        )


def build_source(
    config: TrainConfig,
    acceleration: Acceleration,
    environment: Environment,
    *,
    norm_stats_file: pathlib.Path | None = None,
) -> tuple[TrainConfig, BatchSource]:
    """Opens the dataset and what belongs to it, and settles what the data decides (mapping, prompt length).

    Args:
        config: the run's config.
        acceleration: which cameras are left out and decoded.
        environment: where files are looked for.
        norm_stats_file: None is the assets folder's.

    Raises:
        UserError: something is missing or does not fit; says what to do.
    """
    dataset = open_dataset(find_dataset(config.data.repo_id, config.data.path, environment))
    mapping = resolve_mapping(config.data, dataset)
    tokenizer = functools.partial(
        PromptTokenizer,
        find_tokenizer(config.data.tokenizer_path, environment),
        vocab_size=config.model.vocab_size,
        allow_truncation=config.data.allow_truncation,
    )
    command = stats_command(config, str(dataset.root))
    stats = load_norm_stats(
        norm_stats_file or norm_stats_path(config.assets_base_dir, config.name, config.asset_id), command=command
    )
    max_token_len = settle_max_token_len(dataset, mapping, tokenizer(max_token_len=None), config.model, config.data)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_token_len=max_token_len),
        data=dataclasses.replace(
            config.data, cameras=mapping.cameras, state_key=mapping.state_key, action_key=mapping.action_key
        ),
    )
    source = BatchSource(
        dataset=dataset,
        mapping=mapping,
        norm_stats=stats,
        tokenizer=tokenizer(max_token_len=max_token_len),
        model=config.model,
        data=config.data,
        skip_images=acceleration.skip_images,
        only_consumed=acceleration.skip_video_decode,
    )
    return config, source


def build_data(config: TrainConfig, acceleration: Acceleration, environment: Environment) -> Data:
    """The data of a training run, with every number and every prompt checked.

    Raises:
        UserError: as `build_source` and `validate_before_training`.
    """
    config, source = build_source(config, acceleration, environment)
    rows = rows_of_episodes(source.dataset, config.data.episodes)
    report = validate_before_training(source, rows, command=stats_command(config, str(source.dataset.root)))
    path = norm_stats_path(config.assets_base_dir, config.name, config.asset_id)
    return Data(config=config, source=source, rows=rows, report=report, norm_stats_text=path.read_text())


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
