"""The training loop: feeds the step, watches its metrics, saves. No mathematics."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from openpi_accel.errors import UserError
from openpi_accel.parallel.sharding import batch_sharding, replicated
from openpi_accel.train.checkpoint import CheckpointStore, Position
from openpi_accel.train.disk_space import checkpoint_bytes
from openpi_accel.train.guard import Guard
from openpi_accel.train.metrics import MetricsWriter
from openpi_accel.train.preemption import stop_signals
from openpi_accel.train.prefetch import DevicePrefetcher, LoadedBatch
from openpi_accel.train.progress import ProgressReport
from openpi_accel.train.start import shardings_of
from openpi_accel.train.step import Step
from openpi_accel.train.validation import Validation
from openpi_accel.train.watch import LoopConfig, StepWatch
from openpi_accel.train.watchdog import DATA, END, SAVE, STEP, VALIDATE
from openpi_accel.types import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        state: the last state; None where nothing was left to do.
        next_step: the one after the last that was done.
        exit_code: 0; after SIGTERM that of the run's Preemption (143), and 130 after Ctrl-C.
        unsaved: why the last steps were not saved; empty where they were.
    """

    state: TrainState | None
    next_step: int
    exit_code: int
    unsaved: str = ""


def compile_step(step: Step, mesh: Mesh, state_shardings: TrainState) -> jax.stages.Wrapped:
    """Jits the step: the state sharded as given and donated, the batch split over all devices, metrics everywhere."""
    everywhere = replicated(mesh)
    return jax.jit(
        step,
        in_shardings=(state_shardings, batch_sharding(mesh), everywhere),
        out_shardings=(state_shardings, everywhere),
        donate_argnums=0,
    )


def compile_ahead(
    step: Step, mesh: Mesh, abstract: TrainState, batch: Any, train_rng: jax.Array
) -> jax.stages.Compiled:
    """Compiles `compile_step` for these shapes.

    Args:
        step: the pure step.
        mesh: the devices.
        abstract: the state's shapes with their shardings.
        batch: a global batch, or its shapes with their shardings (`abstract_batch`).
        train_rng: the run's key.
    """
    return compile_step(step, mesh, shardings_of(abstract)).lower(abstract, batch, train_rng).compile()


class StepByStructure:
    """The step for batches of several structures (which cameras they have), compiled for each before training."""

    def __init__(self, compiled: Sequence[tuple[Any, jax.stages.Compiled]]) -> None:
        """(a batch or its shapes, the step compiled for it); no two of one structure."""
        self._by_structure = {jax.tree.structure(batch): step for batch, step in compiled}

    def __call__(self, state: TrainState, batch: Any, train_rng: jax.Array) -> Any:
        """As the step: the new state, and metrics."""
        return self._by_structure[jax.tree.structure(batch)](state, batch, train_rng)


def abstract_batch(local: Any, batch_size: int, mesh: Mesh) -> Any:
    """The shapes of a global batch of `batch_size`, from a batch of any size."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype, sharding=sharding), local)


def run(
    step: Any,
    state: TrainState,
    train_rng: jax.Array,
    loader: Iterable[LoadedBatch],
    config: LoopConfig,
    mesh: Mesh,
    store: CheckpointStore,
    metrics: MetricsWriter,
    *,
    position: Position | None = None,
    on_first_batch: Callable[[LoadedBatch], None] | None = None,
    on_saved: Callable[[], object] = lambda: None,
    rows_of: Callable[[np.ndarray], np.ndarray] = np.asarray,
    validation: Validation | None = None,
    skipped: Callable[[], Sequence[tuple[int, str]]] = tuple,
    show: bool = True,
    guard: Guard | None = None,
) -> RunResult:
    """Trains until num_train_steps, a stop signal, or a non-finite loss.

    The devices never wait for the host: the metrics of a step are read once the next one has been started.

    Args:
        step: from `compile_ahead`, or a `StepByStructure`; its state argument is donated, so the caller must not use
            `state` afterwards.
        state: on the devices, sharded; `state.step` says where to begin.
        train_rng: the run's key; the step folds its number in.
        loader: yields this process's share of every global batch, beginning where the run begins. Its arrays must not
            be written to after they were yielded: on the CPU the device array is the same memory.
        config: intervals.
        mesh: the devices.
        store: where checkpoints go.
        metrics: where figures go.
        position: of the checkpoint that the run was resumed from.
        validation: measures the loss on held-out data, every so many steps and after the last.
        skipped: tells the samples that the loader has left out so far, for the checkpoint.
        on_first_batch: gets the first batch, as the loader gave it.
        on_saved: called whenever a checkpoint of this run is known to be complete, but for the one of a stop signal.
        rows_of: sample ids -> rows of the dataset, by which a person can look samples up.
        show: print progress (process 0).
        guard: hears what the run does, and knows of SIGTERM.

    Raises:
        NonFiniteError: loss or gradient norm is NaN or infinite; at most one more step has run by then, nothing of it
            was saved, and the sample ids of both are in a file that the message names.
        UserError: a checkpoint could not be written, or the loader ended early.
    """
    first_step = int(state.step)
    index = first_step - 1
    progress = ProgressReport(config.num_train_steps, first_step) if show else None
    watch = StepWatch(config, store.folder, metrics, progress, position.unlogged if position else {}, rows_of)
    has_saved, unsaved = False, ""
    saving: int | None = None
    guard = guard or Guard()
    clock, preemption = guard.clock, guard.preemption
    guard.committed, guard.save_problem = lambda: store.timer.committed, store.problem
    save_bytes = checkpoint_bytes(state)

    def announce() -> None:
        """Tells once that the checkpoint which was being written is complete."""
        nonlocal saving
        if progress is not None and saving is not None and store.timer.committed == saving:
            progress.say(f"saved {store.folder / str(saving)} (step {saving})")
            saving = None

    def finish_step() -> None:
        clock.begin(STEP)
        watch.finish_step()
        clock.begin(DATA)

    prefetcher = DevicePrefetcher(loader, batch_sharding(mesh))
    try:
        with stop_signals(preemption):
            for index in range(first_step, config.num_train_steps):
                announce()
                clock.begin_step(index)
                item, wait_s = prefetcher.next(finish_step)
                clock.begin(STEP)
                if item is None:
                    raise UserError(
                        f"The data ended before step {index} of {config.num_train_steps}. Give more episodes, or lower "
                        "--num-train-steps."
                    )
                if index == first_step:
                    if on_first_batch is not None:
                        on_first_batch(item.host)
                    watch.reset_timing()
                state, values = step(state, item.batch, train_rng)
                watch.started(index, values, item.host.sample_ids, wait_s)
                asked = preemption.asked(index)
                stopping = asked or index == config.num_train_steps - 1
                if asked:
                    unsaved = preemption.too_late_to_save(store.timer.predict_s(save_bytes))
                if not unsaved and (stopping or config.saves_after(index, first_step)):
                    watch.read_all()  # nothing is committed before its step is known to be finite
                    clock.begin(SAVE)
                    next_sample = item.host.next_sample
                    store.save(
                        index,
                        state,
                        Position(next_sample=next_sample, unlogged=watch.unlogged(), skipped=tuple(skipped())),
                    )
                    announce()  # this save has waited for the one before
                    if has_saved:
                        on_saved()
                    has_saved, saving = True, index
                    metrics.save_loss_curve()
                measured = index == config.num_train_steps - 1 or (
                    validation is not None and index % validation.interval == 0 and index > first_step
                )
                if validation is not None and measured and not asked:  # the grace of a signal is for saving
                    clock.begin(VALIDATE)
                    watch.validated(index, validation.loss, state)
                if stopping:
                    watch.show_last()
                    watch.show_summary()
                    break
            clock.begin(SAVE)
            store.wait()
            announce()
            clock.begin(END)
            if unsaved:
                unsaved += f"; {guard.kept()}"
            if has_saved and preemption.signal is None:  # a run stopped at once may have been a mistake
                on_saved()
    except BaseException:
        with contextlib.suppress(UserError):  # a save under way is completed; the first error is the one to tell
            store.wait()
            announce()
        raise
    finally:
        prefetcher.close()
        if progress is not None:
            progress.close()
    done = index == config.num_train_steps - 1 and not unsaved
    exit_code = 0 if done or preemption.signal is None else preemption.exit_code
    return RunResult(state=state, next_step=index + 1, exit_code=exit_code, unsaved=unsaved)
