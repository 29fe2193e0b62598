"""The node that is looked at, as the checks reach it."""

import dataclasses
import importlib.metadata
import pathlib
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Collection, Sequence

from openpi_accel.tools.doctor.gpus import MIN_DRIVER, Run
from openpi_accel.tools.doctor.limits import DiskUsage, GetLimit

_TIMEOUT_S = 30  # a sick GPU can make nvidia-smi hang


def run_command(command: Sequence[str]) -> str:
    """A command's output.

    Raises:
        OSError: no such program.
        subprocess.SubprocessError: it fails, or takes longer than 30 s.
    """
    return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout


def resolve(host: str) -> list[str]:
    """The addresses of a host; OSError where it has none."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def listen(port: int) -> None:
    """Listens on a TCP port of all this machine's addresses, and stops at once; OSError where it cannot."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=both):
        pass


def cuda_versions() -> set[int]:
    """Major versions of CUDA for which this Python has a plugin of JAX."""
    return {version for version in MIN_DRIVER if _is_installed(f"jax-cuda{version}-plugin")}


def _is_installed(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The kernel's folders and what is asked of the operating system; tests put others in their place."""

    proc: pathlib.Path = pathlib.Path("/proc")
    sys: pathlib.Path = pathlib.Path("/sys")
    dev: pathlib.Path = pathlib.Path("/dev")
    getrlimit: GetLimit = resource.getrlimit
    disk_usage: DiskUsage = shutil.disk_usage
    run: Run = run_command
    resolve: Callable[[str], Sequence[str]] = resolve
    listen: Callable[[int], None] = listen
    cuda_versions: Callable[[], Collection[int]] = cuda_versions
