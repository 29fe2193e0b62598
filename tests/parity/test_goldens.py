"""Every golden, group by group, within the tolerances of its README."""

import functools
import pathlib

import pytest

from openpi_accel.tools.golden import load_golden
from openpi_accel.tools.parity import GROUPS, Parity

REPO = pathlib.Path(__file__).resolve().parents[2]
CUT, WHOLE = REPO / "tests" / "data" / "goldens", REPO.parent / "shared" / "goldens"

# Name -> (files, groups that the golden does not hold).
CUT_GOLDENS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "fp32": (("pi05_tiny.params", "pi05_tiny.inputs", "pi05_tiny_fp32.outputs"), set()),
    "bf16": (("pi05_tiny.params", "pi05_tiny.inputs", "pi05_tiny_bf16.outputs"), {"augmented"}),
    "lora": (("pi05_tiny_lora.sample",), {"prefix_tokens", "grads", "augmented"}),
    "pi0": (("pi0_tiny_fp32.sample",), {"prefix_tokens", "grads", "augmented", "train"}),
}
WHOLE_GOLDENS: dict[str, set[str]] = {
    "pi05_tiny_fp32": set(),
    "pi05_tiny_bf16": {"augmented"},
    "pi05_tiny_lora": {"augmented"},
    "pi05_tiny_mixed_masks": {"augmented"},
    "pi0_tiny_fp32": {"augmented"},
}


@functools.lru_cache(maxsize=1)
def _parity(*files: pathlib.Path) -> Parity:
    # Tests of one golden run one after another, so that each of its pieces is compiled once.
    return Parity(load_golden(files))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", CUT_GOLDENS)
def test_cut_golden(name: str, group: str) -> None:
    files, absent = CUT_GOLDENS[name]
    result = _parity(*(CUT / f"{file}.npz" for file in files)).run(group)
    assert result.status == ("absent" if group in absent else "ok"), result


@pytest.mark.shared
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", WHOLE_GOLDENS)
def test_whole_golden(name: str, group: str) -> None:
    result = _parity(WHOLE / f"{name}.npz").run(group)
    assert result.status == ("absent" if group in WHOLE_GOLDENS[name] else "ok"), result


def test_cut_goldens_miss_no_group() -> None:
    missed = set.intersection(*(absent for _, absent in CUT_GOLDENS.values()))
    assert not missed
