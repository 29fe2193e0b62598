"""Frozen configuration dataclasses. Values only: no paths are opened and no environment is read here."""

import dataclasses
import os
from typing import Literal

from openpi_accel.errors import UserError

CAMERA_SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
IMAGE_SIZE = 224
AUTO = "auto"
LOCAL_REPO_ID = "local/dataset"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021). The attention delta is scaled by alpha / rank."""

    rank: int
    alpha: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig:
    """Sizes of one Gemma expert."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lora: LoraConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiglipConfig:
    """Sizes of the SigLIP vision tower. Images are IMAGE_SIZE squared."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    patch_size: int = 14

    @property
    def num_tokens(self) -> int:
        """Tokens per image."""
        return (IMAGE_SIZE // self.patch_size) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Everything that fixes the parameter tree and the arithmetic of the model."""

    pi05: bool
    paligemma: GemmaConfig
    action_expert: GemmaConfig
    vision: SiglipConfig
    vocab_size: int
    action_dim: int
    action_horizon: int
    dtype: Literal["bfloat16", "float32"]


GEMMA_VARIANTS = {
    "gemma_2b": GemmaConfig(width=2048, depth=18, mlp_dim=16384, num_heads=8, num_kv_heads=1, head_dim=256),
    "gemma_300m": GemmaConfig(width=1024, depth=18, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256),
    "tiny": GemmaConfig(width=64, depth=3, mlp_dim=128, num_heads=4, num_kv_heads=1, head_dim=16),
    "tiny_expert": GemmaConfig(width=32, depth=3, mlp_dim=64, num_heads=4, num_kv_heads=1, head_dim=16),
    # For the demo, which learns in minutes on a CPU: the action expert, whose tokens are few, is the wide one.
    "demo": GemmaConfig(width=64, depth=2, mlp_dim=128, num_heads=4, num_kv_heads=1, head_dim=16),
    "demo_expert": GemmaConfig(width=128, depth=2, mlp_dim=256, num_heads=4, num_kv_heads=1, head_dim=16),
}
GEMMA_VARIANTS |= {
    "gemma_2b_lora": dataclasses.replace(GEMMA_VARIANTS["gemma_2b"], lora=LoraConfig(rank=16, alpha=16.0)),
    "gemma_300m_lora": dataclasses.replace(GEMMA_VARIANTS["gemma_300m"], lora=LoraConfig(rank=32, alpha=32.0)),
    "tiny_lora": dataclasses.replace(GEMMA_VARIANTS["tiny"], lora=LoraConfig(rank=4, alpha=8.0)),
    "tiny_expert_lora": dataclasses.replace(GEMMA_VARIANTS["tiny_expert"], lora=LoraConfig(rank=6, alpha=6.0)),
}
SIGLIP_VARIANTS = {
    "so400m": SiglipConfig(width=1152, depth=27, mlp_dim=4304, num_heads=16),
    "tiny": SiglipConfig(width=48, depth=2, mlp_dim=96, num_heads=3),
    # Large patches: 4 tokens per image instead of 256, each of which shows where in it something lies.
    "demo": SiglipConfig(width=64, depth=1, mlp_dim=128, num_heads=4, patch_size=112),
}
GemmaVariant = Literal[
    "gemma_2b", "gemma_300m", "tiny", "tiny_expert", "demo", "demo_expert",
    "gemma_2b_lora", "gemma_300m_lora", "tiny_lora", "tiny_expert_lora",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, by the names of its parts."""

    pi05: bool = True
    """True: pi0.5 (time enters by adaRMS). False: pi0 (a state token, time mixed into the action tokens)."""
    paligemma_variant: GemmaVariant = "gemma_2b"
    """Sizes of the expert that reads images and prompt; _lora adds adapters."""
    action_expert_variant: GemmaVariant = "gemma_300m"
    """Sizes of the action expert."""
    vision_variant: Literal["so400m", "tiny", "demo"] = "so400m"
    """Sizes of the vision tower."""
    vocab_size: int = 257152
    """Rows of the token embedding table."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of the transformer blocks; parameters stay float32."""
    action_dim: int = 32
    """State and actions are zero-padded to this many dimensions."""
    action_horizon: int = 50
    """Steps in an action chunk."""
    max_token_len: int | Literal["auto"] = 200
    """Prompt tokens per sample; auto takes the longest prompt of the data, rounded up to a multiple of 4."""
    discrete_state_input: bool = True
    """Write the binned state into the prompt (pi0.5's default; pi05_libero turns it off)."""

    def __post_init__(self) -> None:
        experts = (GEMMA_VARIANTS[self.paligemma_variant], GEMMA_VARIANTS[self.action_expert_variant])
        if any(
            getattr(experts[0], f) != getattr(experts[1], f) for f in ("depth", "num_heads", "num_kv_heads", "head_dim")
        ):
            raise UserError(
                f"The two experts share attention, so {self.paligemma_variant} and {self.action_expert_variant} must "
                "agree in depth, heads and head size. Take a matching pair, for example gemma_2b with gemma_300m."
            )
        if isinstance(self.max_token_len, int) and self.max_token_len < 1:
            raise UserError(f"--model.max-token-len is {self.max_token_len}; it must be at least 1, or auto.")
        if self.discrete_state_input and not self.pi05:
            raise UserError(
                "pi0 takes the state as a token of its own, not in the prompt: add --model.no-discrete-state-input."
            )
        if self.action_horizon < 1:
            raise UserError(f"--model.action-horizon is {self.action_horizon}; it must be at least 1.")

    @property
    def architecture(self) -> Architecture:
        """The sizes behind the variant names."""
        return Architecture(
            pi05=self.pi05,
            paligemma=GEMMA_VARIANTS[self.paligemma_variant],
            action_expert=GEMMA_VARIANTS[self.action_expert_variant],
            vision=SIGLIP_VARIANTS[self.vision_variant],
            vocab_size=self.vocab_size,
            action_dim=self.action_dim,
            action_horizon=self.action_horizon,
            dtype=self.dtype,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CameraKeys:
    """Which dataset camera feeds each of the model's slots. None leaves the slot empty (zeros, masked); with all three
    None a mapping is proposed from the dataset's features."""

    base_0_rgb: str | None = None
    """Dataset key of the outside camera."""
    left_wrist_0_rgb: str | None = None
    """Dataset key of the (left) wrist camera."""
    right_wrist_0_rgb: str | None = None
    """Dataset key of the right wrist camera."""

    def as_dict(self) -> dict[str, str]:
        """Slot -> dataset key for the slots that are fed, in the model's order."""
        return {slot: key for slot in CAMERA_SLOTS if (key := getattr(self, slot)) is not None}


VideoDecoderName = Literal["auto", "pyav", "torchcodec"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A LeRobot dataset and how its columns become the model's inputs."""

    repo_id: str
    """Name of the dataset on the Hub, for example physical-intelligence/libero; also the default asset id."""
    path: str | None = None
    """Local dataset folder. None looks in HF_LEROBOT_HOME and the Hub cache."""
    mixture: str | None = None
    """JSON file of several datasets with their weights, in place of the one dataset (docs/data.md)."""
    asset_id: str | None = None
    """Folder of the norm statistics below assets/<config>; None is the repo id (for local/dataset: local/<folder>)."""
    cameras: CameraKeys = dataclasses.field(default_factory=CameraKeys)
    state_key: str = AUTO
    """Column of the robot state; auto takes observation.state or state."""
    action_key: str = AUTO
    """Column of the actions; auto takes action or actions."""
    default_prompt: str | None = None
    """Prompt where the dataset has no task text."""
    delta_action_dims: int = 0
    """The first n action dimensions are taken relative to the first n of the unnormalised state."""
    normalization: Literal["quantile", "zscore"] = "quantile"
    """quantile maps [q01, q99] to [-1, 1] (all but pi0); zscore subtracts the mean and divides by the deviation."""
    allow_truncation: bool = False
    """Cut prompts longer than max_token_len (with a count) instead of refusing them."""
    tokenizer_path: str | None = None
    """SentencePiece model file; None looks for PaliGemma's below OPENPI_DATA_HOME and in the Hub cache."""
    episodes: tuple[int, ...] | None = None
    """Train on these episodes alone; None is all of them."""
    keep_frames: str | None = None
    """JSON file of the frames to start chunks at, for example {"3": [[0, 120], [200, 340]]}: of episode 3 frames 0 to
    119 and 200 to 339. Episodes that it does not name are kept whole."""
    val_fraction: float = 0.0
    """Hold this share of the episodes out of training, chosen by the seed, and log the loss on them."""
    packed: str | None = None
    """Folder of the dataset's packed cache, made by scripts/pack_dataset.py; None decodes the dataset's own files."""
    on_corrupt: Literal["error", "skip"] = "error"
    """What to do about frames that cannot be read, NaN, or missing task texts: stop, or count, list and leave them
    out."""
    reader: Literal["native", "lerobot"] = "native"
    """What reads the dataset; lerobot is its own LeRobotDataset, every camera decoded, as a baseline (slow)."""
    video_decoder: VideoDecoderName = "auto"
    """What decodes videos; auto is PyAV. The order and the numbers of frames are the same with either."""
    prefetch_batches: int = 4
    """Batches kept ready ahead of the step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What the loss leaves out. Upstream leaves out nothing; the mean is over what counts."""

    mask_padded_steps: bool = False
    """Leave out the steps of an action chunk that lie past the episode's end, where the last action repeats."""
    mask_padded_dims: bool = False
    """Leave out the action dimensions that the dataset does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up, then cosine decay; the warm-up counts into decay_steps."""

    warmup_steps: int = 1000
    """Steps from peak_lr / (warmup_steps + 1) up to peak_lr."""
    peak_lr: float = 2.5e-5
    """Learning rate after the warm-up."""
    decay_steps: int = 30000
    """Step at which the cosine has come down to decay_lr; it stays there."""
    decay_lr: float = 2.5e-6
    """Learning rate at the end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019) after clipping of the global gradient norm."""

    b1: float = 0.9
    """Decay of the gradient's mean."""
    b2: float = 0.95
    """Decay of the gradient's square."""
    eps: float = 1e-8
    """Added to the root of the square."""
    weight_decay: float = 1e-10
    """Decoupled decay of every trained parameter."""
    clip_gradient_norm: float = 1.0
    """Gradients whose global norm is larger are scaled down to it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLoaderConfig:
    """Base weights."""

    params_path: str | None = None
    """Folder of an Orbax `params` checkpoint, for example …/pi05_base/params; a gs:// address is looked for below
    OPENPI_DATA_HOME, where upstream keeps its downloads; None starts from fresh weights."""


RematPolicy = Literal["full", "dots", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematConfig:
    """What the backward pass recomputes, per tower. full: each layer from its input (upstream, least memory). dots: all
    but the products with weights and the attention output. none: nothing (most memory)."""

    gemma: RematPolicy = "full"
    """The two Gemma experts."""
    siglip: RematPolicy = "full"
    """The vision tower."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    name: str
    """Name of the config; a folder below checkpoint_base_dir and assets_base_dir."""
    exp_name: str = ""
    """Name of this run; a folder below <checkpoint-base-dir>/<config>."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig
    weight_loader: WeightLoaderConfig = dataclasses.field(default_factory=WeightLoaderConfig)
    lr_schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    remat: RematConfig = dataclasses.field(default_factory=RematConfig)
    ema_decay: float | None = 0.99
    """Decay of the averaged parameters; None turns the average off."""
    freeze: str = "auto"
    """none, lora, vision, llm, all_but_action_expert, or a regular expression over parameter paths; auto is lora
    where an expert has adapters, else none."""
    seed: int = 42
    """Of initialisation, data order, augmentation and noise."""
    batch_size: int = 32
    """Global batch over all devices and processes."""
    num_microbatches: int = 1
    """Parts of the batch that go through the model one after the other, for memory; the numbers are the whole's."""
    num_workers: int = 2
    """Data workers per process."""
    num_train_steps: int = 30000
    """Steps of the whole run, resumed or not."""
    log_interval: int = 100
    """Steps between rows of metrics.jsonl."""
    save_interval: int = 1000
    """Steps between checkpoints; the last step is always saved."""
    val_interval: int = 1000
    """Steps between two measurements of the loss on held-out episodes (--data.val-fraction)."""
    val_batches: int = 8
    """Batches of one such measurement, at most: always the same samples."""
    keep_period: int | None = 5000
    """Checkpoints at multiples of this step are never deleted."""
    fsdp_devices: int = 1
    """Devices over which parameters, optimizer state and EMA are sharded."""
    assets_base_dir: str = "assets"
    """Norm statistics are looked for in <assets-base-dir>/<config>/<asset id>/norm_stats.json."""
    checkpoint_base_dir: str = "checkpoints"
    """The run's folder is <checkpoint-base-dir>/<config>/<exp-name>. Several nodes must share it."""
    shared_storage_timeout_s: float = 60.0
    """Several nodes: how long a node may take to see a file that another one has written there."""
    grace_s: float = 30.0
    """Seconds between SIGTERM and the platform's kill; a checkpoint that would not be complete by then is not begun."""
    preempt_exit_code: int = 143
    """Exit code after SIGTERM. 0 tells a platform that the job is done, so that it is not started again."""
    resume: bool = False
    """Continue from the last checkpoint of this exp_name."""
    overwrite: bool = False
    """Delete an existing checkpoint folder of this exp_name first."""
    wandb_enabled: bool = False
    """Log to Weights & Biases too, where it is installed; a failing tracker never stops a run."""
    project_name: str = "openpi"
    """Weights & Biases project."""

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise UserError("--resume and --overwrite exclude each other: choose whether to continue or to start anew.")
        for field in (
            "batch_size",
            "num_microbatches",
            "num_train_steps",
            "log_interval",
            "save_interval",
            "fsdp_devices",
        ):
            if getattr(self, field) < 1:
                raise UserError(f"--{field.replace('_', '-')} is {getattr(self, field)}; it must be at least 1.")
        if self.batch_size % self.num_microbatches:
            raise UserError(
                f"--num-microbatches {self.num_microbatches} does not divide --batch-size {self.batch_size}: choose "
                "two numbers that divide."
            )
        if not 0 <= self.data.val_fraction < 1 or self.val_interval < 1 or self.val_batches < 1:
            raise UserError(
                f"--data.val-fraction is {self.data.val_fraction}, --val-interval {self.val_interval}, --val-batches "
                f"{self.val_batches}; the first must be at least 0 and below 1, the others at least 1."
            )
        if self.keep_period is not None and self.keep_period < 1:
            raise UserError(f"--keep-period is {self.keep_period}; it must be at least 1, or None.")
        of_one_dataset = ("path", "asset_id", "episodes", "keep_frames", "packed")
        given = [f"--data.{name.replace('_', '-')}" for name in of_one_dataset if getattr(self.data, name) is not None]
        if self.data.mixture is not None and given:
            raise UserError(
                f"{' and '.join(given)} (launchers: DATA_PATH is --data.path) belong to one dataset, and "
                f"--data.mixture names several: write them into the parts of {self.data.mixture}."
            )
        if self.data.reader == "lerobot" and self.data.packed is not None:
            raise UserError("--data.packed is read natively: leave it out, or take --data.reader native.")
        if self.data.delta_action_dims < 0:
            raise UserError(f"--data.delta-action-dims is {self.data.delta_action_dims}; it must be 0 or more.")
        if not self.grace_s > 0:
            raise UserError(f"--grace-s is {self.grace_s:g}; it must be more than 0, in seconds.")
        if not 0 <= self.preempt_exit_code <= 255:
            raise UserError(f"--preempt-exit-code is {self.preempt_exit_code}; exit codes are 0 to 255.")
        if self.num_workers < 0:
            raise UserError(f"--num-workers is {self.num_workers}; it must be 0 or more.")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise UserError(f"--ema-decay is {self.ema_decay}; it must be at least 0 and below 1, or None.")
        if self.lr_schedule.decay_steps <= self.lr_schedule.warmup_steps:
            raise UserError(
                f"--lr-schedule.decay-steps ({self.lr_schedule.decay_steps}) counts the warm-up too, so it must be "
                f"larger than --lr-schedule.warmup-steps ({self.lr_schedule.warmup_steps})."
            )

    @property
    def asset_id(self) -> str:
        """Folder of the norm statistics below assets/<config>."""
        if self.data.asset_id is None and self.data.repo_id == LOCAL_REPO_ID and self.data.path is not None:
            # A dataset without a name of its own goes by its folder's, so that two do not share their statistics.
            return f"local/{os.path.basename(os.path.abspath(self.data.path))}"
        return self.data.asset_id or self.data.repo_id
