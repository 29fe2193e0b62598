"""Is there room for the run's checkpoints? Found out before training, not at the first save."""

import collections
import json
import math
import pathlib
import shutil
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from openpi_accel.errors import UserError
from openpi_accel.parallel.exchange import from_first
from openpi_accel.sizes import format_bytes
from openpi_accel.train.checkpoint import MAX_TO_KEEP
from openpi_accel.train.checkpoint_tree import to_items
from openpi_accel.train.run_folder import committed_steps, reclaimable_bytes
from openpi_accel.train.watch import LoopConfig
from openpi_accel.types import TrainState


def checkpoint_bytes(state: TrainState) -> int:
    """Size of the arrays of one checkpoint; leaves may be shapes. Files are compressed and somewhat smaller."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(to_items(state)))


def most_at_once(
    saves: Iterable[int], existing: Sequence[int], *, keep_period: int | None, max_to_keep: int = MAX_TO_KEEP
) -> int:
    """How many checkpoints more than `existing` there are while a save is under way, at the most.

    An older one goes only once the new one is complete, and multiples of keep_period never go.

    Args:
        saves: loop indices that will be saved, ascending.
        existing: those that are there already, ascending.
        keep_period, max_to_keep: as CheckpointStore takes them.
    """
    newest = collections.deque(existing[-max_to_keep:])
    stay, most = len(existing) - len(newest), 0
    for index in saves:
        newest.append(index)
        most = max(most, stay + len(newest) - len(existing))
        if len(newest) > max_to_keep:
            oldest = newest.popleft()
            stay += keep_period is not None and oldest % keep_period == 0
    return most


def judge(
    folder: pathlib.Path, free_bytes: int, one_bytes: int, most: int, *, keep_period: int | None
) -> tuple[str, str]:
    """(error, warning), each empty where there is nothing to say; pure.

    Args:
        folder: the run folder.
        free_bytes: free where the folder lies.
        one_bytes: size of one checkpoint.
        most: how many are to come on top of what is there, at the most (`most_at_once`); 0 asks for no room.
        keep_period: as CheckpointStore takes it.
    """
    if free_bytes >= most * one_bytes:
        return "", ""
    sizes = f"{format_bytes(free_bytes)} are free for checkpoints in {folder}, and one takes {format_bytes(one_bytes)}"
    kept = "" if keep_period is None else f", or keep fewer for good (--keep-period, now {keep_period}, or None)"
    smaller = "A checkpoint is smaller with --ema-decay None, and with less that trains (--freeze, adapters)."
    if free_bytes < one_bytes:
        return f"{sizes}. Free space there, or choose another --checkpoint-base-dir. {smaller}", ""
    return "", (
        f"{sizes}: room for {free_bytes // one_bytes} of them. While one is written the older one is still there: this "
        f"run needs room for {most}"
        + (", with those that stay" if most > MAX_TO_KEEP + 1 else "")
        + ". A later save will fail and stop the run, with the older checkpoint in place. Free space, choose another "
        f"--checkpoint-base-dir{kept}."
    )


def check_disk_space(
    folder: pathlib.Path,
    state: TrainState,
    schedule: LoopConfig,
    *,
    resume_from: int | None,
    overwrite: bool,
    keep_period: int | None,
) -> str:
    """Compares the free space with what the run will save. Process 0 looks, and all go on or stop together.

    Quotas and reserved space that the file system does not tell are not seen.

    Args:
        folder: the run folder, which need not exist yet.
        state: its shapes.
        schedule: when checkpoints are written.
        resume_from: loop index of the checkpoint that the run goes on from.
        overwrite: the run that is in the folder will be deleted before the first save.
        keep_period: as CheckpointStore takes it.

    Returns:
        A warning, or nothing.

    Raises:
        UserError: not even one checkpoint fits; on every process.
    """

    def look() -> str:
        first_step = 0 if resume_from is None else resume_from + 1
        saves = (i for i in range(first_step, schedule.num_train_steps) if schedule.saves_after(i, first_step))
        try:
            existing = [] if resume_from is None else committed_steps(folder)
            free = _free_bytes(folder) + reclaimable_bytes(folder, overwrite=overwrite)
        except OSError:  # nothing can be told; a save that fails will say why
            return json.dumps(["", ""])
        most = most_at_once(saves, existing, keep_period=keep_period)
        return json.dumps(judge(folder, free, checkpoint_bytes(state), most, keep_period=keep_period))

    error, warning = json.loads(from_first(look))
    if error:
        raise UserError(error)
    return str(warning)


def _free_bytes(folder: pathlib.Path) -> int:
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    usage = shutil.disk_usage(there)
    if usage.total == 0:  # some file systems in user space do not know
        raise OSError(f"{there} tells no size")
    return usage.free
