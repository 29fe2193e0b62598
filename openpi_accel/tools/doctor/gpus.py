"""The node's GPUs, as nvidia-smi sees them. Imports no JAX."""

import dataclasses
import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence

from openpi_accel.tools.doctor.finding import Finding

# Runs a command; its output. OSError where there is no such program, SubprocessError where it fails or hangs.
Run = Callable[[Sequence[str]], str]

# CUDA's major version -> the oldest driver's major version (pyproject.toml).
MIN_DRIVER = {12: 525, 13: 580}
IDLE_MIB = 1024.0
IDLE_PERCENT = 5.0
_FIELDS = ("index", "uuid", "name", "driver_version", "memory.used", "memory.total", "utilization.gpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; what it does not tell is None."""

    index: str
    uuid: str
    name: str
    driver: str
    used_mib: float | None
    total_mib: float | None
    utilization_percent: float | None


def survey(run: Run, env: Mapping[str, str], cuda_versions: Collection[int]) -> list[Finding]:
    """Which GPUs there are, whether their driver fits, and whether others use them.

    Args:
        run: see Run.
        env: JAX_PLATFORMS, CUDA_VISIBLE_DEVICES and NPROC_PER_NODE.
        cuda_versions: major versions of CUDA that this Python's JAX has.
    """
    if env.get("JAX_PLATFORMS", "").strip() == "cpu":
        return [Finding(name="GPUs", level="ok", seen="not looked at: JAX_PLATFORMS=cpu")]
    try:
        gpus = query(run)
    except subprocess.SubprocessError as error:
        advice = "Look at nvidia-smi and dmesg. To train on the CPU on purpose: JAX_PLATFORMS=cpu."
        return [Finding(name="GPUs", level="error", seen=f"nvidia-smi fails: {_reason(error)}", advice=advice)]
    except OSError:
        advice = "If this node has GPUs: start the container with --gpus=all, or put nvidia-smi on the PATH."
        return [Finding(name="GPUs", level="unknown", seen="no nvidia-smi: training would use the CPU", advice=advice)]
    chosen = visible(gpus, env)
    return [present(gpus, chosen, env), driver(gpus, cuda_versions, run), idle(chosen)]


def query(run: Run) -> list[Gpu]:
    """All GPUs of the node."""
    text = run(["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [
        Gpu(
            index=row[0],
            uuid=row[1],
            name=row[2],
            driver=row[3],
            used_mib=_number(row[4]),
            total_mib=_number(row[5]),
            utilization_percent=_number(row[6]),
        )
        for row in rows
        if len(row) == len(_FIELDS)
    ]


def visible(gpus: Sequence[Gpu], env: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves. As CUDA does: an entry that names none ends the list."""
    if "CUDA_VISIBLE_DEVICES" not in env or "MIG-" in env["CUDA_VISIBLE_DEVICES"]:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in (word.strip() for word in env["CUDA_VISIBLE_DEVICES"].split(",")):
        named = [gpu for gpu in gpus if entry == gpu.index or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))]
        if not named:
            break
        chosen += named
    return chosen


def present(gpus: Sequence[Gpu], chosen: Sequence[Gpu], env: Mapping[str, str]) -> Finding:
    """Number and kind, against NPROC_PER_NODE."""
    kinds = " and ".join(
        f"{sum(gpu.name == kind for gpu in gpus)} x {kind}" for kind in dict.fromkeys(g.name for g in gpus)
    )
    seen = kinds or "none"
    if len(chosen) != len(gpus):
        seen += f"; CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES')} leaves {len(chosen)}"
    if not chosen:
        return Finding(
            name="GPUs", level="error", seen=seen, advice="Unset CUDA_VISIBLE_DEVICES, or for a CPU: JAX_PLATFORMS=cpu."
        )
    expected = env.get("NPROC_PER_NODE", "").strip()
    if expected.isdigit() and int(expected) not in (1, len(chosen)):  # 1 is what a launcher of one process says
        advice = "Has one fallen off the bus (nvidia-smi, dmesg), or is it not given to the container?"
        return Finding(name="GPUs", level="warning", seen=f"{seen}, but NPROC_PER_NODE={expected}", advice=advice)
    return Finding(name="GPUs", level="ok", seen=seen)


def driver(gpus: Sequence[Gpu], cuda_versions: Collection[int], run: Run) -> Finding:
    """Whether the driver is new enough for the CUDA that JAX has here."""
    drivers = sorted({gpu.driver for gpu in gpus})
    seen = f"driver {' and '.join(drivers)}"
    if not cuda_versions:
        advice = "Training would use the CPU. Let the launcher make the environment, or install jax[cuda12 or cuda13]."
        return Finding(
            name="GPU driver", level="error", seen=f"{seen}; no CUDA plugin of JAX in this Python", advice=advice
        )
    majors = [int(match.group()) for text in drivers if (match := re.match(r"\d+", text))]
    cuda = max(cuda_versions)
    seen, least = f"{seen}, CUDA {cuda}", min(majors, default=0)
    if least >= MIN_DRIVER[cuda]:
        return Finding(name="GPU driver", level="ok", seen=seen)
    advice = f"CUDA {cuda} needs driver {MIN_DRIVER[cuda]} or newer: update it"
    advice += ", or take requirements/cuda12.txt." if cuda > 12 and least >= MIN_DRIVER[12] else "."
    # NVIDIA's compatibility libraries, which some containers bring, lift an older driver; nvidia-smi then says so.
    lifted = re.search(r"CUDA Version\s*:\s*(\d+)", run(["nvidia-smi"]))
    enough = lifted is not None and int(lifted[1]) >= cuda
    return Finding(name="GPU driver", level="warning" if enough else "error", seen=seen, advice=advice)


def idle(chosen: Sequence[Gpu]) -> Finding:
    """Whether somebody else computes on these GPUs."""
    busy = [gpu for gpu in chosen if (gpu.used_mib or 0) > IDLE_MIB or (gpu.utilization_percent or 0) > IDLE_PERCENT]
    if not busy:
        return Finding(name="GPU use", level="ok", seen="idle")
    seen = ", ".join(
        f"GPU {gpu.index}: {_shown(gpu.used_mib)} MiB, {_shown(gpu.utilization_percent)} %" for gpu in busy
    )
    advice = (
        "JAX takes three quarters of each GPU's memory at once. End what runs there (nvidia-smi), or choose other GPUs."
    )
    return Finding(name="GPU use", level="warning", seen=f"not idle: {seen}", advice=advice)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported]
        return None


def _shown(number: float | None) -> str:
    return "?" if number is None else f"{number:.0f}"


def _reason(error: subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        words = " ".join(f"{error.output or ''} {error.stderr or ''}".split())
        return f"exit code {error.returncode}, {words[:300] or 'without a word'}"
    return str(error)
