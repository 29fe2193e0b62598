"""The folder of one run, <checkpoint-base-dir>/<config>/<exp_name>: may it be used, and what does it hold."""

import dataclasses
import json
import pathlib
import shutil
import time
from typing import Any

import jax
from jax.experimental import multihost_utils

from openpi_accel.config.flags import Acceleration
from openpi_accel.errors import UserError
from openpi_accel.parallel.exchange import gather_texts, name_ranks

# Where a step whose loss is not finite leaves the ids of its samples.
NOT_FINITE = "not_finite_step_{step}.json"
_POLL_S = 0.5
_TEMPORARY = ".orbax-checkpoint-tmp"
# What a run writes before its first step; metrics.jsonl is empty then.
_OF_THE_START = {"config.json", "environment.json", "metrics.jsonl", "tensorboard", "first_batch.png"}


def committed_steps(folder: pathlib.Path) -> list[int]:
    """Loop indices of the complete checkpoints, ascending. Only those have plain numbers as names."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit() and (entry / "params").is_dir())


def check_run_folder(folder: pathlib.Path, *, resume: bool, overwrite: bool) -> int | None:
    """May this run use the folder? Changes nothing.

    Returns:
        The loop index of the checkpoint to resume from, or None for a fresh start. A run that was stopped before its
        first save starts again when resumed.

    Raises:
        UserError: the folder is in use without resume or overwrite, or there is nothing to resume.
    """
    in_use = folder.is_dir() and any(folder.iterdir())
    steps = committed_steps(folder)
    if resume and not steps and committed_steps(replaced_folder(folder)):
        raise UserError(
            f"{folder} has no checkpoint: it was killed before its first save. The run that it was to overwrite is "
            f"still there. To go on with that one: rm -r {folder} && mv {replaced_folder(folder)} {folder}. To start "
            "the new one again: --overwrite (launchers: without RESUME=1)."
        )
    if in_use and not resume and not overwrite:
        last = f" (last checkpoint: {steps[-1]})" if steps else ""
        raise UserError(
            f"{folder} already holds a run{last}. Continue it with --resume (launchers: RESUME=1), start anew and "
            "delete it with --overwrite, or choose another --exp-name (launchers: EXP_NAME)."
        )
    if resume and not in_use:
        raise UserError(
            f"--resume, but there is nothing to resume in {folder}. Check --exp-name (launchers: EXP_NAME) and "
            f"--checkpoint-base-dir, or leave --resume out to start a run. {_known_runs(folder)}"
        )
    return steps[-1] if resume and steps else None


def find_checkpoint(folder: pathlib.Path, *, resume: bool, overwrite: bool, timeout_s: float) -> int | None:
    """`check_run_folder` with one answer for all processes, which must all call this: the newest that any of them sees.

    A network file system may list a folder from a cache, so that a node does not see what another one has just written;
    each of them reads its own part of a checkpoint, and parts of two would make a state that never was.

    Args:
        timeout_s: how long a process may need to see what another one sees.

    Raises:
        UserError: as `check_run_folder`, or one of them does not see it in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        step, problem = None, ""
        try:
            step = check_run_folder(folder, resume=resume, overwrite=overwrite)
        except UserError as error:
            problem = str(error)
        view = {"step": step, "problem": problem, "over": time.monotonic() >= deadline_s}
        views = [json.loads(text) for text in gather_texts(json.dumps(view))]
        seen = [view["step"] for view in views if view["step"] is not None]
        problems = [view["problem"] for view in views if view["problem"]]
        if problems and not seen:
            raise UserError(problem or problems[0])
        lacking = [rank for rank, view in enumerate(views) if seen and view["step"] != max(seen)]
        if not lacking:
            return step
        if views[0]["over"]:
            raise UserError(
                f"{folder} holds checkpoint {max(seen)}, which {name_ranks(lacking)} did not see within {timeout_s:g} "
                "s. --checkpoint-base-dir must be one folder on storage that all nodes share; if it is, and only slow "
                "to show what another node wrote, start again in a minute or raise --shared-storage-timeout-s."
            )
        time.sleep(_POLL_S)


def prepare_run_folder(folder: pathlib.Path, *, resume: bool, overwrite: bool) -> int | None:
    """Makes the folder ready for a run; every process calls this. Returns and raises as `check_run_folder`.

    Clears what an interrupted save left behind. A run that is overwritten is only moved aside: `discard_replaced`
    deletes it once the new one has a checkpoint, `restore_replaced` puts it back if the new one never got so far.
    """
    resume_from = check_run_folder(folder, resume=resume, overwrite=overwrite)
    _barrier("run_folder_seen")  # nobody changes the folder before everybody has looked
    if jax.process_index() == 0:
        if overwrite and folder.exists():
            if replaced_folder(folder).exists() and not committed_steps(folder):
                shutil.rmtree(folder)  # killed before it had anything; the run before it is the one to keep
            else:
                discard_replaced(folder)
                folder.rename(replaced_folder(folder))
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
    _barrier("run_folder_ready")
    return resume_from


def discard_replaced(folder: pathlib.Path) -> None:
    """Deletes the run that this one has overwritten, if there is one."""
    if jax.process_index() == 0 and replaced_folder(folder).exists():
        shutil.rmtree(replaced_folder(folder))


def restore_replaced(folder: pathlib.Path) -> bool:
    """Puts the overwritten run back in place of a new one that came to nothing; whether there was one."""
    if jax.process_index() != 0 or not replaced_folder(folder).exists() or committed_steps(folder):
        return False
    for evidence in folder.glob(NOT_FINITE.format(step="*")):  # an error message names it
        shutil.move(evidence, replaced_folder(folder) / evidence.name)
    shutil.rmtree(folder, ignore_errors=True)
    replaced_folder(folder).rename(folder)
    return True


def discard_start(folder: pathlib.Path) -> None:
    """Deletes the folder of a run that ended before its first log and left nothing to look at, so that the next try
    finds it free."""
    if jax.process_index() != 0 or not folder.is_dir():
        return
    metrics = folder / "metrics.jsonl"
    logged = metrics.exists() and metrics.stat().st_size > 0
    if not logged and all(entry.name in _OF_THE_START for entry in folder.iterdir()):
        shutil.rmtree(folder, ignore_errors=True)


def replaced_folder(folder: pathlib.Path) -> pathlib.Path:
    """Where the run lies that this one overwrites, until this one has a checkpoint."""
    return folder.with_name(f".{folder.name}.replaced")


def remove_leftovers(folder: pathlib.Path) -> None:
    """Deletes what saves that were killed or failed have left; complete checkpoints have other names."""
    for entry in folder.iterdir():
        if _TEMPORARY in entry.name:
            shutil.rmtree(entry, ignore_errors=True)


def reclaimable_bytes(folder: pathlib.Path, *, overwrite: bool) -> int:
    """What a start frees before its first save; a run with checkpoints that is overwritten stays until after it."""
    if overwrite and not committed_steps(folder):
        return _size_of(folder)
    if overwrite:
        return _size_of(replaced_folder(folder))
    return sum(_size_of(entry) for entry in folder.glob(f"*{_TEMPORARY}*"))


def surroundings(acceleration: Acceleration) -> dict[str, Any]:
    """What a run's figures depend on beside its config, as environment.json holds it."""
    return {
        "acceleration": dataclasses.asdict(acceleration),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
    }


def _size_of(folder: pathlib.Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _known_runs(folder: pathlib.Path) -> str:
    if not folder.parent.is_dir():
        return ""
    entries = [entry for entry in folder.parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    runs = sorted(entry.name for entry in entries if committed_steps(entry))
    return f"Runs that can be resumed there: {', '.join(runs)}." if runs else ""


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
