"""Keeps Orbax quiet about failures that the caller is told of anyway, so that the user gets one message.

Orbax and its event loops log the traceback of every error that is raised again. And once one read or write has failed,
Orbax awaits none of the others: their errors surface when the garbage collector finds them, and TensorStore's threads
report to an event loop that is gone.
"""

import functools
import logging
import sys
import types
from typing import Any

_ORBAX_FILES = "/orbax/checkpoint/"
_LOOP_IS_GONE = "Event loop is closed"


@functools.cache  # once per process
def keep_orbax_quiet() -> None:
    """From here on such reports are dropped; all others take the way they took before."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    unraisable_before, uncaught_before = sys.unraisablehook, sys.excepthook

    def unraisable(report: Any) -> None:
        if not is_stray(report.exc_value, report.object):
            unraisable_before(report)

    def uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if not is_stray(error, None):
            uncaught_before(kind, error, trace)

    sys.unraisablehook, sys.excepthook = unraisable, uncaught


def is_stray(error: BaseException | None, source: object) -> bool:
    """Whether this is the echo of a failure that Orbax has raised already.

    Args:
        error: what nobody caught.
        source: the object that it came from, if any.
    """
    if isinstance(error, RuntimeError) and str(error) == _LOOP_IS_GONE:
        return True
    return isinstance(source, types.CoroutineType) and _ORBAX_FILES in source.cr_code.co_filename
