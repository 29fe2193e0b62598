"""Shows how far the reading of a dataset is, where it takes over a second."""

import time
from collections.abc import Iterable, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ReadingBar:
    """A context in which files are read; `track` is a `Track`. Everything goes to stderr."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False, patience_s: float = 1.0) -> None:
        """Shows nothing yet.

        Args:
            console: where to; None is stderr.
            quiet: never show anything: for processes other than the first.
            patience_s: seconds from now, before which nothing is shown.
        """
        self._console = Console(stderr=True) if console is None else console
        self._quiet, self._show_at_s = quiet, time.monotonic() + patience_s
        columns = TextColumn("reading {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._shown = False

    def __enter__(self) -> "ReadingBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        if not self._quiet:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def track[T](self, items: Sequence[T], what: str) -> Iterable[T]:
        """The items, shown by a bar on a terminal; elsewhere one line says that something is being read."""
        task = self._bar.add_task(what, total=len(items))
        for item in items:
            yield item
            self._bar.advance(task)
            if not self._shown and not self._quiet and time.monotonic() > self._show_at_s:
                self._shown = True
                self._bar.start()
                if not self._console.is_terminal:
                    self.say(f"reading {what} and what follows of {len(items)} files")
