"""Every acceleration of the step: what switches it on, what it replaces, and how exactly it must agree.

tests/equivalence has a case for every row, and compares the losses and all gradients within the row's contract.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig

# Largest difference of a gradient leaf over its largest entry, float32 on the CPU.
_EXACT, _REORDERED = 0.0, 2e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One acceleration.

    Attributes:
        name: how benchmark and tests call it.
        switch: what the user writes.
        fields: the fields of Acceleration that it sets.
        options: the options of the config that it sets, by dotted path.
        bound: contract in float32: 0 means equal to the last bit, else the largest difference relative to the
            largest entry of a leaf. The loss is held to the same number.
        reference: what it replaces; candidate: by what.
        unsupported: where it is an error.
        in_opt: run_opt.sh turns it on where there is a GPU.
    """

    name: str
    switch: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bound: float
    reference: str
    candidate: str
    unsupported: str = ""
    in_opt: bool = True

    @property
    def environment(self) -> dict[str, str]:
        """The variables of `switch`."""
        return dict(word.split("=", 1) for word in self.switch.split() if word.startswith("OPENPI_"))

    @property
    def arguments(self) -> tuple[str, ...]:
        """The options of `switch`."""
        return () if self.environment else tuple(self.switch.split())


CATALOG: tuple[Entry, ...] = (
    Entry(
        name="camera_elision",
        switch="OPENPI_SKIP_IMAGES=right_wrist_0_rgb",
        fields={"skip_images": ("right_wrist_0_rgb",)},
        bound=_REORDERED,
        reference="a masked black image in every slot",
        candidate="the slot left out: no decode, transfer, vision tower or tokens",
        unsupported="leaving out every slot",
    ),
    Entry(
        name="attention_xla",
        switch="OPENPI_FLASH_ATTN=1 OPENPI_FLASH_IMPL=xla",
        fields={"flash_attn": True, "flash_impl": "xla"},
        bound=_REORDERED,
        reference="models.attention.gemma_attention, siglip_attention",
        candidate="accel.attention.gemma_attention_xla, siglip_attention_xla",
        in_opt=False,
    ),
    Entry(
        name="attention_auto",
        switch="OPENPI_FLASH_ATTN=1 OPENPI_FLASH_IMPL=auto",
        fields={"flash_attn": True, "flash_impl": "auto"},
        bound=_REORDERED,
        reference="models.attention.gemma_attention, siglip_attention",
        candidate="accel.choose.fastest: per tower the faster of xla and, where it runs, cudnn",
    ),
    Entry(
        name="attention_cudnn",
        switch="OPENPI_FLASH_ATTN=1 OPENPI_FLASH_IMPL=cudnn",
        fields={"flash_attn": True, "flash_impl": "cudnn"},
        bound=_REORDERED,
        reference="models.attention.gemma_attention, siglip_attention",
        candidate="accel.attention.gemma_attention_cudnn, siglip_attention_cudnn",
        unsupported="without an NVIDIA GPU, or in float32",
        in_opt=False,
    ),
    Entry(
        name="one_vision_pass",
        switch="OPENPI_BATCH_CAMERAS=1",
        fields={"batch_cameras": True},
        bound=_REORDERED,
        reference="models.ops.encode_one_by_one",
        candidate="accel.vision.encode_in_one_pass",
    ),
    Entry(
        name="early_casts",
        switch="OPENPI_CAST_EARLY=1",
        fields={"cast_early": True},
        bound=_EXACT,
        reference="each layer casts its weights where it uses them",
        candidate="accel.cast.cast_weights_early",
    ),
    Entry(
        name="unrolled_layers",
        switch="OPENPI_UNROLL_LAYERS=1",
        fields={"unroll_layers": True},
        bound=_REORDERED,
        reference="models.stack.ScanLayers",
        candidate="accel.layers.UnrolledLayers: no stacked residuals, no dead last-layer work, gradients in turn",
    ),
    Entry(
        name="remat_dots",
        switch="--remat.gemma dots --remat.siglip dots",
        options={"remat.gemma": "dots", "remat.siglip": "dots"},
        bound=_REORDERED,
        reference="models.stack.ScanLayers, everything recomputed",
        candidate="the same with a policy that keeps the products (accel.layers.POLICIES)",
    ),
    Entry(
        name="remat_none",
        switch="--remat.gemma none --remat.siglip none",
        options={"remat.gemma": "none", "remat.siglip": "none"},
        bound=_REORDERED,
        reference="models.stack.ScanLayers, everything recomputed",
        candidate="the same with a policy that keeps everything",
        in_opt=False,
    ),
    Entry(
        name="microbatches",
        switch="--num-microbatches 2",
        options={"num_microbatches": 2},
        bound=_REORDERED,
        reference="jax.value_and_grad of the whole batch",
        candidate="accel.microbatch.accumulated",
        unsupported="a batch that the number does not divide",
        in_opt=False,
    ),
)


def switched_on(entry: Entry, config: TrainConfig, acceleration: Acceleration) -> tuple[TrainConfig, Acceleration]:
    """Both settings with this entry on."""
    return set_options(config, entry.options), dataclasses.replace(acceleration, **entry.fields)


def set_options(config: Any, options: Mapping[str, Any]) -> Any:
    """A frozen config with values at dotted paths replaced."""
    for path, value in options.items():
        head, _, rest = path.partition(".")
        config = dataclasses.replace(
            config, **{head: set_options(getattr(config, head), {rest: value}) if rest else value}
        )
    return config
