"""Imported first by every script here: makes the project importable from a clone, wherever the script is started."""

import importlib.util
import pathlib
import sys
from collections.abc import Callable

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SCRIPTS = pathlib.Path(__file__).resolve().parent
# This folder last: its profile.py must not stand in for the standard library's module of that name.
sys.path[:] = [str(_ROOT), *(path for path in sys.path if pathlib.Path(path).resolve() != _SCRIPTS), str(_SCRIPTS)]

# jax stands for all packages; missing_packages.py lists each.
if sys.version_info < (3, 12) or importlib.util.find_spec("jax") is None:
    print(
        f"error: {sys.executable} is older than Python 3.12 or lacks this project's packages.\n"
        "Activate the environment that the launchers make:\n"
        f"    source {_ROOT / '.venv/bin/activate'}\n"
        f"(not there yet? bash {_ROOT / 'run_opt.sh'} pi05_demo makes it), or see what this Python lacks:\n"
        f"    {sys.executable} {_ROOT / 'scripts/missing_packages.py'}",
        file=sys.stderr,
    )
    sys.exit(2)


def run(main: Callable[[], int | None], end: Callable[[int], object] = sys.exit) -> None:
    """As openpi_accel.cli.run: a user's mistake becomes one message and exit code 2."""
    from openpi_accel import cli

    cli.run(main, end)
