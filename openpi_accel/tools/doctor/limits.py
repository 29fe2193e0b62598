"""What the operating system or the container allows this process."""

import pathlib
import resource
import shutil
from collections.abc import Callable

from openpi_accel.sizes import format_bytes
from openpi_accel.tools.doctor.finding import Finding

GetLimit = Callable[[int], tuple[int, int]]
DiskUsage = Callable[[pathlib.Path], shutil._ntuple_diskusage]

GIB = 2**30
# The kernel's default before 5.16: the queues of a few connections alone are larger.
HOPELESS_MEMLOCK = 64 * 2**10
MIN_OPEN_FILES = 65536
MIN_SHM_GIB = 1.0
_CAP_IPC_LOCK = 14


def memlock(getrlimit: GetLimit, proc: pathlib.Path, *, rdma: bool) -> Finding:
    """How much memory may be locked: RDMA locks what a network card reads and writes.

    Args:
        getrlimit: as resource.getrlimit.
        proc: the folder /proc.
        rdma: this run would use RDMA.
    """
    limit, _ = getrlimit(resource.RLIMIT_MEMLOCK)
    seen = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**10:.0f} KiB"
    if limit == resource.RLIM_INFINITY:
        return Finding(name="memlock", level="ok", seen=seen)
    if _may_lock_anything(proc):
        return Finding(name="memlock", level="ok", seen=f"{seen}, which does not bind this process (CAP_IPC_LOCK)")
    if not rdma:
        return Finding(name="memlock", level="ok", seen=f"{seen} (matters for RDMA alone, which is not in use)")
    return Finding(
        name="memlock",
        level="error" if limit <= HOPELESS_MEMLOCK else "warning",
        seen=f"{seen}; NCCL over RDMA needs it unlimited and fails with 'Cannot allocate memory'",
        advice="Start the container with --ulimit memlock=-1:-1 (on a host: memlock unlimited in "
        "/etc/security/limits.conf), or go without RDMA: NCCL_IB_DISABLE=1.",
    )


def open_files(getrlimit: GetLimit) -> Finding:
    """How many files and sockets may be open."""
    soft, hard = getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return Finding(name="open files", level="ok", seen="unlimited" if soft == resource.RLIM_INFINITY else f"{soft}")
    mends = "ulimit -n 65536 in the shell that starts training"
    if hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
        mends = "Start the container with --ulimit nofile=1048576:1048576"
    return Finding(
        name="open files",
        level="warning",
        seen=f"{soft} (below {MIN_OPEN_FILES})",
        advice=f"Many GPUs, nodes and data workers may need more. {mends}.",
    )


def shared_memory(disk_usage: DiskUsage, dev: pathlib.Path) -> Finding:
    """Size and free space of /dev/shm, through which NCCL moves data between GPUs that cannot reach each other.

    Args:
        disk_usage: as shutil.disk_usage.
        dev: the folder /dev.
    """
    folder = dev / "shm"
    advice = "Start the container with --shm-size=16g or --ipc=host."
    if not folder.is_dir():
        return Finding(name="shared memory", level="warning", seen=f"there is no {folder}", advice=advice)
    usage = disk_usage(folder)
    total, free = usage.total / GIB, usage.free / GIB
    seen = f"{format_bytes(usage.total)}, {format_bytes(usage.free)} of it free"
    if total < MIN_SHM_GIB:
        return Finding(name="shared memory", level="warning", seen=f"{seen} (below {MIN_SHM_GIB:g} GiB)", advice=advice)
    if free < MIN_SHM_GIB:
        advice = f"Delete what ended processes have left in {folder} (ls -l {folder}), or make it larger."
        return Finding(name="shared memory", level="warning", seen=seen, advice=advice)
    return Finding(name="shared memory", level="ok", seen=seen)


def _may_lock_anything(proc: pathlib.Path) -> bool:
    """Whether the process has CAP_IPC_LOCK, to which the limit does not apply."""
    try:
        lines = (proc / "self" / "status").read_text().splitlines()
    except OSError:
        return False
    effective = [line.split()[1] for line in lines if line.startswith("CapEff:")]
    return bool(effective) and bool(int(effective[0], 16) >> _CAP_IPC_LOCK & 1)
