"""What all tests share: eight CPU devices, strict JAX, and the folder ../shared where it is there.

The device count is set before JAX starts, so every test of the process sees the same eight CPU devices.
"""

import os
import pathlib
import subprocess
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


_NO_NAMESPACES = pytest.StashKey[int]()
_DESELECTED = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what needs ../shared where that folder is absent; in CI its absence is an error. Deselects what needs
    network namespaces where they cannot be made."""
    needs_namespaces = [item for item in items if item.get_closest_marker("namespaces")]
    config.stash[_NO_NAMESPACES] = 0
    if needs_namespaces and not can_make_two_nodes():
        config.stash[_NO_NAMESPACES] = len(needs_namespaces)
        config.hook.pytest_deselected(items=needs_namespaces)
        items[:] = [item for item in items if not item.get_closest_marker("namespaces")]
    needs_shared = [item for item in items if item.get_closest_marker("shared")]
    config.stash[_DESELECTED] = 0
    if SHARED.is_dir() or not needs_shared:
        return
    if os.environ.get("CI", "").lower() in ("1", "true"):
        raise pytest.UsageError(
            f"CI is set, but ../shared is absent, so {len(needs_shared)} tests could not run. Lay the folder beside "
            "the clone, or unset CI to run without them."
        )
    config.stash[_DESELECTED] = len(needs_shared)
    config.hook.pytest_deselected(items=needs_shared)
    items[:] = [item for item in items if not item.get_closest_marker("shared")]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With several test processes (pytest-xdist) each collects all tests, so any one's count is the count."""
    node.config.stash[_DESELECTED] = getattr(node, "workeroutput", {}).get("deselected", 0)
    node.config.stash[_NO_NAMESPACES] = getattr(node, "workeroutput", {}).get("no_namespaces", 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands the count on to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = session.config.stash.get(_DESELECTED, 0)
        session.config.workeroutput["no_namespaces"] = session.config.stash.get(_NO_NAMESPACES, 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how many tests did not run for want of ../shared."""
    count = config.stash.get(_DESELECTED, 0)
    state = "absent" if not SHARED.is_dir() else "present"
    terminalreporter.write_line(f"../shared is {state}: {count} tests deselected for want of it")
    if count := config.stash.get(_NO_NAMESPACES, 0):
        terminalreporter.write_line(
            f"no network namespaces can be made here: {count} tests deselected for want of them"
        )


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
