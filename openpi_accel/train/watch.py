"""Watches the metrics of a run without holding the devices up: finite or not, means, timing, the log."""

import dataclasses
import json
import math
import os
import pathlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from openpi_accel.errors import UserError
from openpi_accel.train.memory import peak_memory_gib
from openpi_accel.train.metrics import MetricsWriter, hash_sample_ids
from openpi_accel.train.progress import ProgressReport
from openpi_accel.train.run_folder import NOT_FINITE
from openpi_accel.train.run_times import RunTimes
from openpi_accel.types import TrainState


class NonFiniteError(UserError):
    """The loss or a gradient became NaN or infinite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """When things happen. Steps count from 0 over the whole run, resumed or not."""

    num_train_steps: int
    batch_size: int
    log_interval: int
    save_interval: int

    def saves_after(self, index: int, first_step: int) -> bool:
        """Whether a checkpoint follows this step, in a run that begins with `first_step`."""
        return index == self.num_train_steps - 1 or (index % self.save_interval == 0 and index > first_step)


@dataclasses.dataclass(frozen=True)
class _Started:
    index: int
    values: dict[str, jax.Array]
    sample_ids: np.ndarray
    wait_s: float


class StepWatch:
    """Reads the metrics of started steps one step late, refuses what is not finite, and logs the means."""

    def __init__(
        self,
        config: LoopConfig,
        folder: pathlib.Path,
        metrics: MetricsWriter,
        progress: ProgressReport | None,
        unlogged: Mapping[str, list[float]],
        rows_of: Callable[[np.ndarray], np.ndarray] = np.asarray,
    ) -> None:
        self._config, self._folder, self._metrics, self._progress = config, folder, metrics, progress
        self._flight: deque[_Started] = deque()
        self._rows_of = rows_of
        self._values: dict[str, list[float]] = {name: list(v) for name, v in unlogged.items()}
        self._times = RunTimes(config.batch_size)
        self.reset_timing()

    def started(self, index: int, values: dict[str, jax.Array], sample_ids: np.ndarray, wait_s: float) -> None:
        """Step `index` is on its way; reads the one before it."""
        for value in values.values():
            value.copy_to_host_async()
        self._flight.append(_Started(index, values, sample_ids, wait_s))
        self._wait_s += wait_s
        while len(self._flight) > 1:
            self._read()

    def finish_step(self) -> None:
        """Blocks until all started steps are done."""
        if self._flight:
            jax.block_until_ready(self._flight[-1].values)

    def read_all(self) -> None:
        """Reads every started step."""
        while self._flight:
            self._read()

    def unlogged(self) -> dict[str, list[float]]:
        """Values read since the last log."""
        return {name: list(values) for name, values in self._values.items()}

    def _read(self) -> None:
        started = self._flight[0]
        values = {name: float(value) for name, value in started.values.items()}
        if not all(math.isfinite(value) for value in values.values()):
            raise self._not_finite(values)
        self._flight.popleft()
        self._last_read = started.index
        self._times.step_done(started.wait_s)
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)
        self._timed_steps += 1
        if self._progress is not None:
            self._progress.advance(started.index)
        if started.index % self._config.log_interval == 0:
            self._log(started)

    def _log(self, started: _Started) -> None:
        elapsed_s = time.perf_counter() - self._last_log_s
        row: dict[str, Any] = {
            "step": started.index,
            **{name: math.fsum(values) / len(values) for name, values in self._values.items()},
            "samples_per_s": self._config.batch_size * self._timed_steps / elapsed_s,
            "step_s": elapsed_s / self._timed_steps,
            "data_wait_share": min(1.0, self._wait_s / elapsed_s),
            **peak_memory_gib(),
            "sample_ids_hash": hash_sample_ids(started.sample_ids),
        }
        row["learning_rate"] = self._values["learning_rate"][-1]  # the schedule's value at this step, no mean
        self._metrics.write(row)
        if self._progress is not None:
            self._progress.show(row)
        self._values = {}
        self.reset_timing()

    def validated(self, index: int, measure: Callable[[TrainState], float], state: TrainState) -> None:
        """Measures the loss on held-out data after step `index`; the time it takes is not the steps'."""
        self.read_all()
        start = time.perf_counter()
        loss = measure(state)
        self._metrics.write({"step": index, "val_loss": loss})
        if self._progress is not None:
            self._progress.say(f"step {index} | validation loss {loss:.4f}")
        self._last_log_s += time.perf_counter() - start

    def show_last(self) -> None:
        """Shows the loss of the last step that was read, unless the log has just done so."""
        if self._progress is not None and self._values:
            index, loss = self._last_read, self._values["loss"][-1]
            self._progress.say(f"step {index}/{self._config.num_train_steps} | loss {loss:.4f} (this step alone)")

    def show_summary(self) -> None:
        """Shows how fast this process's steps were."""
        summary = self._times.summary()
        if self._progress is not None and summary is not None:
            self._progress.say(summary)

    def reset_timing(self) -> None:
        """Figures of speed count from here."""
        self._timed_steps, self._wait_s, self._last_log_s = 0, 0.0, time.perf_counter()

    def _not_finite(self, values: dict[str, float]) -> NonFiniteError:
        started = self._flight[0]
        path = self._folder / NOT_FINITE.format(step=started.index)
        content = {
            "step": started.index,
            "metrics": {name: repr(value) for name, value in values.items()},
            "sample_ids": {str(step.index): self._rows_of(step.sample_ids).tolist() for step in self._flight},
        }
        if jax.process_index() == 0:  # all processes know the ids of the whole batch and see the same metrics
            aside = path.with_suffix(".tmp")
            aside.write_text(json.dumps(content, indent=1))
            os.replace(aside, path)
        shown = ", ".join(f"{name} {values[name]}" for name in values if not math.isfinite(values[name]))
        return NonFiniteError(
            f"Step {started.index} is not finite ({shown}); training stopped and nothing of it was saved. The ids of "
            f"its samples are in {path}. Look at them with scripts/inspect_dataset.py --check, and compute the norm "
            "statistics anew if the data changed; if the data is sound, lower --lr-schedule.peak-lr. Then continue "
            "from the last checkpoint with --resume (launchers: RESUME=1)."
        )
