"""What every entry script shares."""

import sys
from collections.abc import Callable

from openpi_accel.errors import UserError


def run(main: Callable[[], int | None]) -> None:
    """Runs an entry point: a UserError becomes one message and exit code 2, Ctrl-C exit code 130."""
    try:
        code = main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    sys.exit(code)
