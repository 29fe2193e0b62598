"""How a run shows itself: one line that moves on a terminal, plain lines elsewhere."""

import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"


class ProgressReport:
    """Shows the steps of a run and its latest figures.

    Args:
        num_steps: the last step is num_steps - 1.
        first_step: the step that this process starts with.
        stream: where to write, None is stdout; a terminal gets a moving bar.
    """

    def __init__(self, num_steps: int, first_step: int, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self._num_steps = num_steps
        self._stream = stream
        self._bar: Progress | None = None
        if stream.isatty():
            console = Console(file=stream)
            # The figures need 80 columns; the bar is drawn where there is room beside them.
            bar = [BarColumn(bar_width=20)] if console.width >= 105 else []
            self._bar = Progress(
                TextColumn("step"), MofNCompleteColumn(), *bar, TextColumn("{task.description}"), console=console
            )
            self._task = self._bar.add_task("compiling the step", total=num_steps, completed=first_step)
            self._bar.start()

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def advance(self, step: int) -> None:
        """`step` is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1)

    def show(self, row: dict[str, float]) -> None:
        """The figures of a log step: a row of metrics.jsonl."""
        remaining_s = (self._num_steps - row["step"] - 1) * row["step_s"]
        text = (
            f"loss {row['loss']:.4f} | {row['samples_per_s']:.1f} samples/s | "
            f"data wait {100 * row['data_wait_share']:.0f} % | ETA {format_duration(remaining_s)}"
        )
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            print(f"step {row['step']:.0f}/{self._num_steps} | {text}", file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
