"""TrainConfig and data -> what measures the loss on held-out episodes."""

import jax
from jax.sharding import Mesh

from openpi_accel.build.data import Data
from openpi_accel.build.mixture import Mixture
from openpi_accel.build.sharded import sharded_loss, sharded_ops
from openpi_accel.data.augment import to_float
from openpi_accel.models.ops import REFERENCE_OPS
from openpi_accel.models.pure import bind
from openpi_accel.objective import make_loss_fn
from openpi_accel.train.validation import Validation


def build_validation(data: Data | Mixture, mesh: Mesh) -> Validation | None:
    """None where no episode is held out. Images are not augmented; the model's units are the reference ones."""
    if not any(len(part.val_rows) for part in data.datasets):
        return None
    config = data.config

    def plain(rng: jax.Array, images: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return to_float(images)

    ops = sharded_ops(REFERENCE_OPS, mesh)
    return Validation(
        loss_fn=sharded_loss(make_loss_fn(bind(config.model.architecture, ops), plain), mesh),
        batches=data.validation_batches,
        interval=config.val_interval,
        seed=config.seed,
        mesh=mesh,
    )
