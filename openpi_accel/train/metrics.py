"""What a run writes about itself: metrics.jsonl, TensorBoard, optionally Weights & Biases, and two pictures.

The trackers are never fatal. Only process 0 writes.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from tensorboardX import SummaryWriter

from openpi_accel.errors import UserError
from openpi_accel.train.contact_sheet import contact_sheet

METRICS_FILE = "metrics.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """A Weights & Biases run: project, name of the run, and the config to show there."""

    project: str
    name: str
    config: Mapping[str, Any]


class MetricsWriter:
    """Appends rows to the run folder's metrics.jsonl and the trackers.

    Args:
        folder: the run folder.
        resume_step: the first step that this run will do; rows of it and of later ones are dropped, so that no step is
            there twice. 0 for a fresh run.
        wandb: log to Weights & Biases too.
        enabled: False on all processes but the first; then nothing is written.
    """

    def __init__(
        self, folder: pathlib.Path, *, resume_step: int = 0, wandb: WandbSettings | None = None, enabled: bool = True
    ) -> None:
        self.folder = folder
        self._enabled = enabled
        self._wandb: Any = None
        if not enabled:
            return
        self._path = folder / METRICS_FILE
        _keep_rows_before(self._path, resume_step)
        self._file = self._path.open("a")
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step)
        if wandb is not None:
            self._wandb = _start_wandb(folder, wandb, resuming=resume_step > 0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds one row; `step` is its key, values are numbers or text."""
        if not self._enabled:
            return
        try:
            self._file.write(json.dumps(dict(row)) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self._path} could not be written: {error}. Free space (df -h), then resume.") from error
        numbers = {key: value for key, value in row.items() if isinstance(value, float)}
        for key, value in numbers.items():
            self._tensorboard.add_scalar(key, value, row["step"])
        if self._wandb is not None:
            try:
                self._wandb.log(numbers, step=row["step"])
            except Exception as error:  # a tracker's own troubles are of many kinds, and none may stop a run
                warnings.warn(f"Weights & Biases failed and is off from here on: {error}", stacklevel=2)
                self._wandb = None

    def save_images(
        self, images: Mapping[str, np.ndarray], captions: Sequence[str] = (), name: str = "first_batch.png"
    ) -> None:
        """One labelled picture (`contact_sheet`).

        Args:
            images: camera -> B H W 3 uint8.
            captions: of the samples.
            name: file in the run folder.
        """
        if not self._enabled or not images:
            return
        sheet = contact_sheet(images, captions)
        self._save_picture(name, lambda path: Image.fromarray(sheet).save(path, format="PNG"))

    def save_loss_curve(self, name: str = "loss_curve.png") -> None:
        """Draws loss and gradient norm over the steps of metrics.jsonl."""
        if not self._enabled:
            return
        rows = read_rows(self._path)
        held_out = [row for row in rows if "val_loss" in row]
        rows = [row for row in rows if "loss" in row]
        if not rows:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4), layout="constrained")
        FigureCanvasAgg(figure)
        steps = [row["step"] for row in rows]
        for axis, key in zip(figure.subplots(1, 2), ("loss", "grad_norm"), strict=True):
            axis.plot(steps, [row[key] for row in rows], marker="." if len(rows) < 50 else "")
            axis.set(xlabel="step", ylabel=key, yscale="log")
            axis.grid(alpha=0.3, which="both")
            if key == "loss" and held_out:
                steps_held_out = [row["step"] for row in held_out]
                axis.plot(steps_held_out, [row["val_loss"] for row in held_out], marker="o", label="held-out episodes")
                axis.legend()
        self._save_picture(name, lambda path: figure.savefig(path, format="png", dpi=120))

    def _save_picture(self, name: str, write: Callable[[pathlib.Path], object]) -> None:
        try:
            _replace(self.folder / name, write)
        except OSError as error:
            warnings.warn(f"{self.folder / name} could not be written: {error}", stacklevel=3)

    def close(self) -> None:
        """Flushes everything."""
        if not self._enabled:
            return
        self._file.close()
        self._tensorboard.close()
        if self._wandb is not None:
            try:
                self._wandb.finish()
            except Exception as error:
                warnings.warn(f"Weights & Biases could not finish: {error}", stacklevel=2)


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a killed run left half-written is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def hash_sample_ids(sample_ids: np.ndarray) -> str:
    """Sixteen hex digits that tell batches apart; the order counts."""
    return hashlib.sha256(np.ascontiguousarray(sample_ids, dtype="<i8").tobytes()).hexdigest()[:16]


def _keep_rows_before(path: pathlib.Path, step: int) -> None:
    if not path.exists():
        return
    kept = [row for row in read_rows(path) if row["step"] < step]
    _replace(path, lambda aside: aside.write_text("".join(json.dumps(row) + "\n" for row in kept)))


def _replace(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """Writes aside, then puts in place, so that a good file is never half-overwritten."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        write(aside)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _start_wandb(folder: pathlib.Path, settings: WandbSettings, *, resuming: bool) -> Any:
    """A run object, or None with a warning: not installed, no network, no login, a lost id."""
    id_file = folder / "wandb_id.txt"
    try:
        import wandb

        run_id = id_file.read_text().strip() if resuming and id_file.is_file() else None
        run = wandb.init(
            project=settings.project,
            name=settings.name,
            config=dict(settings.config),
            dir=str(folder),
            id=run_id,
            resume="allow" if run_id else None,
        )
        _replace(id_file, lambda path: path.write_text(run.id))
        return run
    except Exception as error:
        warnings.warn(f"Weights & Biases is off: {error}. Everything is in {folder / METRICS_FILE} too.", stacklevel=2)
        return None
