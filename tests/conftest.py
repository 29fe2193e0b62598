"""What all tests share: eight CPU devices, strict JAX, compiled programs, and the folder ../shared where it is there.

The device count is set before JAX starts, so every test of the process sees the same eight CPU devices.
"""

import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

NUM_CPU_DEVICES = 8
REPO = pathlib.Path(__file__).resolve().parents[1]
SHARED = REPO.parent / "shared"
DATA = REPO / "tests" / "data"
_COMPILED_PREFIX = "openpi-tests-compiled-"

# What one test has compiled, no other process of this run compiles again; for the environments of the processes that
# tests start, too.
COMPILED = pathlib.Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or tempfile.mkdtemp(prefix=_COMPILED_PREFIX))
COMPILING = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(COMPILED),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    # An eighth less to compile than at LLVM's level 3, with which .ci/run compares the goldens once more.
    "XLA_FLAGS": "--xla_backend_optimization_level=1",
}
os.environ.update(COMPILING)
# For the environment of a process whose numbers are compared with no other program's: compiling is most of its time.
# The fixture `quick` does the same in this process.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_threefry_partitionable", True)  # the random streams that upstream's numbers rest on
jax.config.update("jax_numpy_rank_promotion", "raise")  # a missing axis must not broadcast by luck
for name in [name for name in os.environ if name.startswith("OPENPI_")]:
    del os.environ[name]  # a switch in the developer's shell must not reach a test


def as_two_nodes() -> list[str]:
    """The words before a command that may then make networks and name hosts of its own."""
    return ["unshare", "--net", "--uts", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


def can_make_two_nodes() -> bool:
    """Whether this machine lets us; a container often does not."""
    try_out = [
        *as_two_nodes(),
        "sh",
        "-c",
        "ip link add near type veth peer name far && mount --bind /etc/hosts /etc/hosts",
    ]
    try:
        return subprocess.run(try_out, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


_DESELECTED = pytest.StashKey[dict[str, int]]()
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Marker -> what its tests need, and whether that is there.
_NEEDS: dict[str, tuple[str, Callable[[], bool]]] = {
    "shared": ("../shared", SHARED.is_dir),
    "namespaces": ("network namespaces", can_make_two_nodes),
    "browser": ("a browser (chromium)", lambda: find_browser() is not None),
    "long": ("LONG_TESTS=1", lambda: os.environ.get("LONG_TESTS") == "1"),
}


def find_browser() -> str | None:
    """Chromium or Chrome on the PATH."""
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what needs something that is not there; in CI the absence of ../shared is an error."""
    config.stash[_DESELECTED] = {}
    for marker, (_, is_there) in _NEEDS.items():
        wanting = [item for item in items if item.get_closest_marker(marker)]
        if not wanting or is_there():
            continue
        if marker == "shared" and os.environ.get("CI", "").lower() in ("1", "true"):
            raise pytest.UsageError(
                f"CI is set, but ../shared is absent, so {len(wanting)} tests could not run. Lay the folder beside the "
                "clone, or unset CI to run without them."
            )
        config.stash[_DESELECTED][marker] = len(wanting)
        config.hook.pytest_deselected(items=wanting)
        items[:] = [item for item in items if not item.get_closest_marker(marker)]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With several test processes (pytest-xdist) each collects all tests, so any one's count is the count."""
    node.config.stash[_DESELECTED] = getattr(node, "workeroutput", {}).get("deselected", {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands the counts on to the process that prints, which clears up."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = session.config.stash.get(_DESELECTED, {})
    elif COMPILED.name.startswith(_COMPILED_PREFIX):
        shutil.rmtree(COMPILED, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how many tests did not run, and for want of what."""
    counts = config.stash.get(_DESELECTED, {})
    for marker, (what, _) in _NEEDS.items():
        terminalreporter.write_line(f"{counts.get(marker, 0)} tests deselected for want of {what}")


@pytest.fixture
def quick() -> Iterator[None]:
    """What this test compiles, it compiles as quickly as QUICK does."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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
