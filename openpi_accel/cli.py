"""What every entry script shares."""

import errno
import sys
from collections.abc import Callable

from openpi_accel.errors import UserError

# What the user can mend about a file or folder, wherever it is met.
_MENDABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR)


def run(main: Callable[[], int | None]) -> None:
    """Runs an entry point: a UserError or an unusable path becomes one message and exit code 2, Ctrl-C 130."""
    try:
        code = main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    except OSError as error:
        if error.errno not in _MENDABLE or error.filename is None:
            raise
        print(
            f"error: {error.filename}: {error.strerror}. Choose another folder, or mend its permissions or space.",
            file=sys.stderr,
            flush=True,
        )
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    sys.exit(code)
