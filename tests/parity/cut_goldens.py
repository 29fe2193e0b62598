"""Cuts ../shared/goldens down to what ships in tests/data/goldens: python tests/parity/cut_goldens.py

Every array is upstream's own; nothing is computed here. Outputs per sample keep the first sample. Gradients and
training steps depend on the whole batch, so the goldens that have them keep all four samples of the inputs.
"""

import pathlib
from collections.abc import Callable

import numpy as np

REPO = pathlib.Path(__file__).resolve().parents[2]
SOURCE, TARGET = REPO.parent / "shared" / "goldens", REPO / "tests" / "data" / "goldens"

PER_SAMPLE = ("fwd/", "augmented/", "sample/", "train_loss_augmented")
INPUTS = ("obs/", "actions", "noise", "time")
LARGEST_BATCH_LEAF = 4096
"""Larger leaves of gradients and of trained parameters are left out."""


def cut(source: str, target: str, keep: Callable[[str, np.ndarray], np.ndarray | None], **meta: int) -> None:
    """Writes the arrays that `keep` returns."""
    with np.load(SOURCE / f"{source}.npz") as archive:
        kept = {key: value for key in archive.files if (value := keep(key, archive[key])) is not None}
    kept |= {f"meta/{key}": np.asarray(value) for key, value in meta.items()}
    np.savez_compressed(TARGET / f"{target}.npz", **kept)
    print(f"{target}.npz: {len(kept)} arrays, {(TARGET / f'{target}.npz').stat().st_size / 2**20:.2f} MiB")


def params(key: str, value: np.ndarray) -> np.ndarray | None:
    """The parameters alone."""
    return value if key.startswith("params/") else None


def inputs(key: str, value: np.ndarray) -> np.ndarray | None:
    """The inputs alone, the whole batch."""
    return value if key.startswith(INPUTS) or key == "rng_key_data" else None


def outputs(key: str, value: np.ndarray) -> np.ndarray | None:
    """All outputs: per sample the first, of what depends on the batch the small leaves."""
    if key.startswith(PER_SAMPLE):
        return value[:1]
    if key.startswith(("params/", *INPUTS)) or (
        key.startswith(("grads/", "train/")) and value.size > LARGEST_BATCH_LEAF
    ):
        return None
    return value


def one_sample(key: str, value: np.ndarray) -> np.ndarray | None:
    """Everything that one sample suffices for, but for the bulky outputs of the prefix."""
    if key.startswith(("grads/", "train/", "fwd/prefix_out", "fwd/prefix_tokens")):
        return None
    return value[:1] if key.startswith((*PER_SAMPLE, *INPUTS)) else value


if __name__ == "__main__":
    TARGET.mkdir(parents=True, exist_ok=True)
    cut("pi05_tiny_fp32", "pi05_tiny.params", params)
    cut("pi05_tiny_fp32", "pi05_tiny.inputs", inputs)
    for name in ("pi05_tiny_fp32", "pi05_tiny_bf16"):
        cut(name, f"{name}.outputs", outputs, num_samples=1)
    cut("pi05_tiny_lora", "pi05_tiny_lora.sample", one_sample)
    cut("pi0_tiny_fp32", "pi0_tiny_fp32.sample", one_sample)
