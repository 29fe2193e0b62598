"""Checkpoints in upstream's layout, written beside the training and put in place only when complete.

<run folder>/<loop index>/params/       what a policy loads: the averaged weights, or the raw ones without averaging
<run folder>/<loop index>/train_state/  step, optimizer state, and the raw weights where params/ holds averages
<run folder>/<loop index>/assets/       norm statistics
<run folder>/<loop index>/resume/       ours, ignored by upstream: data position, settings, metrics not yet logged
"""

import contextlib
import dataclasses
import json
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from openpi_accel.errors import UserError, is_broken_collective
from openpi_accel.orbax_noise import keep_orbax_quiet
from openpi_accel.train.checkpoint_tree import read_state, to_items
from openpi_accel.train.run_folder import committed_steps, remove_leftovers
from openpi_accel.train.save_time import SaveTimer
from openpi_accel.train.tree_save import TreeSaveHandler, share_out
from openpi_accel.types import TrainState

MAX_TO_KEEP = 1
_SAVE_TIMEOUT_S = 7200
_RESUME_FILE = "resume/resume.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands beside its arrays.

    Attributes:
        next_sample: index of the first sample not yet trained on; None in checkpoints written by upstream.
        unlogged: metric name -> its values in the steps since the last log, so that a resumed mean is the same.
        skipped: (sample, why) of the samples that the loader has left out so far.
    """

    next_sample: int | None
    unlogged: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    skipped: Sequence[tuple[int, str]] = ()


class TextFilesHandler(ocp.CheckpointHandler):
    """Writes TextFiles; they are read as plain files."""

    def save(self, directory: Any, args: "TextFiles") -> None:
        if jax.process_index() != 0:
            return
        for name, text in args.files.items():
            path = pathlib.Path(directory) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def restore(self, directory: Any, args: "TextFiles | None" = None) -> dict[str, str]:
        root = pathlib.Path(directory)
        return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


@ocp.args.register_with_handler(TextFilesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class TextFiles(ocp.args.CheckpointArgs):
    """Small text files to store below one folder: relative path -> text."""

    files: Mapping[str, str]


class CheckpointStore:
    """Writes and reads the checkpoints of one run folder, which `prepare_run_folder` has made ready.

    Args:
        folder: the run folder.
        keep_period: checkpoints at multiples of it are never deleted; None keeps the newest alone.
        max_to_keep: how many of the newest to keep. An older one goes only when the new one is complete.
        assets: relative path -> text, stored with every checkpoint, for example
            {"physical-intelligence/libero/norm_stats.json": "{...}"}.
        settings: what must stay the same on resume, as JSON values, for example {"ema_decay": 0.99}.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        keep_period: int | None = None,
        max_to_keep: int = MAX_TO_KEEP,
        assets: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        keep_orbax_quiet()
        self._folder = folder.resolve()
        self._timer = SaveTimer()
        self._noting: threading.Thread | None = None
        self._problem: Exception | None = None
        self._assets = dict(assets or {})
        self._settings = json.loads(json.dumps(dict(settings or {})))  # as they will be read back
        handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        for item in ("params", "train_state"):
            handlers.add(item, ocp.args.PyTreeSave, TreeSaveHandler(self._failed))
        for item in ("assets", "resume"):
            handlers.add(item, TextFiles, TextFilesHandler())
        self._manager = ocp.CheckpointManager(
            self._folder,
            handler_registry=handlers,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=max_to_keep,
                keep_period=keep_period,
                create=True,
                async_options=ocp.AsyncOptions(timeout_secs=_SAVE_TIMEOUT_S),
            ),
        )

    @property
    def folder(self) -> pathlib.Path:
        """The run folder."""
        return self._folder

    @property
    def timer(self) -> SaveTimer:
        """How long saves take."""
        return self._timer

    def save(self, loop_index: int, state: TrainState, position: Position) -> None:
        """Starts to write a checkpoint and returns once `state` may be donated; waits for the previous one first.

        Raises:
            UserError: this save or the previous one could not be written; the older checkpoint is still there.
        """
        self.wait()
        self._timer.began(loop_index)
        params, train_state = share_out(to_items(state))
        resume = {"position": dataclasses.asdict(position), "settings": self._settings}
        try:
            self._manager.save(
                loop_index,
                args=ocp.args.Composite(
                    params=ocp.args.PyTreeSave(params),
                    train_state=ocp.args.PyTreeSave(train_state),
                    assets=TextFiles(self._assets),
                    resume=TextFiles({pathlib.PurePath(_RESUME_FILE).name: json.dumps(resume)}),
                ),
            )
        except (OSError, ValueError) as error:  # TensorStore's errors are ValueErrors
            raise self._save_failed(error) from error
        self._noting = threading.Thread(target=self._note_end, name="save noted", daemon=True)
        self._noting.start()

    def _note_end(self) -> None:
        """Runs in every process: the writer's own callback is process 0's alone, and comes before the last rename."""
        with contextlib.suppress(Exception):  # `wait` raises it, too, to whoever asks
            self._manager.wait_until_finished()
            self._timer.ended()

    def problem(self) -> UserError | None:
        """Why this process could not write its part of a save; answered from memory, as the storage may stall."""
        if self._problem is None or is_broken_collective(self._problem):
            return None
        return self._not_written(self._problem, self._timer.committed)

    def _failed(self, error: Exception) -> None:
        self._problem = error

    def wait(self) -> None:
        """Blocks until the last save is complete.

        Raises:
            UserError: it could not be written; the older checkpoint is still there.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:  # TensorStore's errors are ValueErrors
            raise self._save_failed(error) from error
        if self._noting is not None:
            self._noting.join()

    def close(self) -> None:
        """Waits, then releases the writer's threads. Raises as `wait`."""
        try:
            self._manager.close()
        except (OSError, ValueError) as error:  # TensorStore's errors are ValueErrors
            raise self._save_failed(error) from error

    def restore(self, loop_index: int, target: TrainState) -> tuple[TrainState, Position]:
        """Reads a checkpoint straight to the shards of `target`, on any number of devices.

        Args:
            loop_index: which one.
            target: the state's shapes, jax.ShapeDtypeStruct leaves with shardings.

        Raises:
            UserError: the checkpoint is of another model or of other settings, or damaged.
        """
        folder = self._folder / str(loop_index)
        if not (folder / "train_state").is_dir():
            raise UserError(
                f"{folder} has no train_state/, so it cannot be resumed. Delete it to resume from an older one, or "
                f"start a run of its own from its weights: --weight-loader.params-path={folder / 'params'}"
            )
        position, _ = _read_resume(folder)
        check_settings(folder, self._settings)
        state = read_state(folder, target)
        self._timer.committed = loop_index
        return state, position

    def _save_failed(self, error: Exception) -> Exception:
        """Frees the space of the failed save and says what is still there; the error itself where it is no save's."""
        if is_broken_collective(error):
            return error
        if jax.process_index() == 0:
            remove_leftovers(self._folder)
        steps = committed_steps(self._folder)
        return self._not_written(error, steps[-1] if steps else None)

    def _not_written(self, error: Exception, committed: int | None) -> UserError:
        if committed is None:
            return UserError(
                f"A checkpoint could not be written to {self._folder}: {str(error)[:500]}. It would have been "
                "the first of this run. If the disk is full, free space (df -h) or choose another "
                "--checkpoint-base-dir, then start again."
            )
        kept = f"The older checkpoint {self._folder / str(committed)} is complete and stays"
        return UserError(
            f"A checkpoint could not be written to {self._folder}: {str(error)[:500]}. {kept}. If the disk is full, "
            "free space (df -h) or choose another --checkpoint-base-dir, then continue with --resume (launchers: "
            "RESUME=1)."
        )


def check_settings(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
    """Compares what a checkpoint was trained with, where it says so, with these settings; reads no array.

    Args:
        folder: of the checkpoint.
        settings: as CheckpointStore takes them.

    Raises:
        UserError: names each value that differs.
    """
    _, saved = _read_resume(folder)
    if saved is None:
        return
    old, new = _flat(saved), _flat(json.loads(json.dumps(dict(settings))))
    changed = [
        f"{name}: saved {old.get(name)!r}, now {new.get(name)!r}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    if changed:
        raise UserError(
            f"{folder} was trained with other settings:\n    "
            + "\n    ".join(changed)
            + "\nResume with the saved ones (leave these options out: the run's config.json has them), or start a run "
            f"of its own from these weights: another --exp-name with --weight-loader.params-path={folder / 'params'}"
        )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings by their path, an empty one being itself."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{path}": leaf for path, leaf in _flat(value).items()}
        else:
            flat[name] = value
    return flat


def _read_resume(folder: pathlib.Path) -> tuple[Position, Mapping[str, Any] | None]:
    path = folder / _RESUME_FILE
    if not path.is_file():  # written by upstream
        return Position(next_sample=None), None
    try:
        content = json.loads(path.read_text())
        skipped = tuple((int(sample), str(why)) for sample, why in content["position"].pop("skipped", ()))
        return Position(**content["position"], skipped=skipped), content["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}). Delete {folder} to resume from an older checkpoint.") from error
