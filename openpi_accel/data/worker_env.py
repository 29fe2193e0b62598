"""What a data worker's process inherits, decided before it is started: no GPU, one thread per library, its cores."""

import os
import sys
from collections.abc import Mapping, Sequence

# Empty: a library that asks for devices finds none, whatever imports it.
_HIDE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Workers are the parallelism; a pool of threads in each would only crowd the cores.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Meant for the trainer's devices; a flag that the CPU does not know would stop a worker.
_DROP = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_OPTIMIZATION_LEVEL")


def worker_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a worker: that of this process (or `base`), without accelerators."""
    environment = dict(os.environ if base is None else base)
    for name in _DROP:
        environment.pop(name, None)
    environment |= dict.fromkeys(_HIDE, "") | dict.fromkeys(_ONE_THREAD, "1")
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    return environment


def worker_cores(available: Sequence[int] | None = None) -> list[int]:
    """The cores that workers share: this process's (or `available`) but the first ones, which stay the trainer's.

    One core in eight stays, at least one; on a single core there is nothing to divide.
    """
    cores = sorted(os.sched_getaffinity(0) if available is None else available)
    return cores[max(1, len(cores) // 8) :] or cores
