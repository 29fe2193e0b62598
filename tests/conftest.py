"""What all tests share: eight CPU devices, strict JAX, the folder ../shared and a browser where there are such.

The device count is set before JAX starts, so every test of the process sees the same eight CPU devices.
"""

import os
import pathlib
import shutil
from typing import Any

import jax
import pytest

NUM_CPU_DEVICES = 8
REPO = pathlib.Path(__file__).resolve().parents[1]
SHARED = REPO.parent / "shared"
DATA = REPO / "tests" / "data"

os.environ["JAX_PLATFORMS"] = "cpu"  # inherited by the processes that tests start
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
jax.config.update("jax_threefry_partitionable", True)  # the random streams that upstream's numbers rest on
jax.config.update("jax_numpy_rank_promotion", "raise")  # a missing axis must not broadcast by luck
for name in [name for name in os.environ if name.startswith("OPENPI_")]:
    del os.environ[name]  # a switch in the developer's shell must not reach a test

_DESELECTED = pytest.StashKey[dict[str, int]]()
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """Chromium or Chrome on the PATH."""
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what needs ../shared or a browser where that is absent; in CI the absence of ../shared is an error."""
    needed = {"shared": SHARED.is_dir(), "browser": find_browser() is not None}
    absent = [marker for marker, there in needed.items() if not there]
    wanting = {marker: [item for item in items if item.get_closest_marker(marker)] for marker in absent}
    config.stash[_DESELECTED] = {marker: len(found) for marker, found in wanting.items()}
    if wanting.get("shared") and os.environ.get("CI", "").lower() in ("1", "true"):
        raise pytest.UsageError(
            f"CI is set, but ../shared is absent, so {len(wanting['shared'])} tests could not run. Lay the folder "
            "beside the clone, or unset CI to run without them."
        )
    config.hook.pytest_deselected(items=[item for found in wanting.values() for item in found])
    items[:] = [item for item in items if not any(item.get_closest_marker(marker) for marker in absent)]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With several test processes (pytest-xdist) each collects all tests, so any one's count is the count."""
    node.config.stash[_DESELECTED] = getattr(node, "workeroutput", {}).get("deselected", {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands the counts on to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = session.config.stash.get(_DESELECTED, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how many tests did not run for want of ../shared or of a browser."""
    counts = config.stash.get(_DESELECTED, {})
    for name, marker, there in (
        ("../shared", "shared", SHARED.is_dir()),
        ("a browser (chromium)", "browser", find_browser() is not None),
    ):
        state = "present" if there else "absent"
        terminalreporter.write_line(f"{name} is {state}: {counts.get(marker, 0)} tests deselected for want of it")


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder ../shared: goldens/, datasets/, libero/. Only for tests marked `shared`."""
    assert SHARED.is_dir(), "a test uses the fixture `shared` without @pytest.mark.shared"
    return SHARED


@pytest.fixture(scope="session")
def repo() -> pathlib.Path:
    """The root of this checkout."""
    return REPO


@pytest.fixture(scope="session")
def data() -> pathlib.Path:
    """tests/data: small goldens that ship with the project."""
    return DATA
