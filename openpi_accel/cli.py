"""What every entry script shares."""

import contextlib
import sys
import traceback
from collections.abc import Callable

from openpi_accel.errors import told


def run(main: Callable[[], int | None], end: Callable[[int], object] = sys.exit) -> None:
    """Runs an entry point: an error that the user can mend is one message (`errors.told`), any other a traceback.

    Args:
        main: gives the exit code; None is 0.
        end: ends the process with a code; for scripts that may be one of several processes.
    """
    try:
        code = main() or 0
    except (Exception, KeyboardInterrupt) as error:
        message, code = told(error)
        with contextlib.suppress(OSError):  # the log may lie on a full disk
            print(message or traceback.format_exc(), file=sys.stderr, flush=True)
    end(code)
