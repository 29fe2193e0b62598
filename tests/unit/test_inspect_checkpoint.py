"""inspect_checkpoint: what it finds, what it compares, and its exit codes."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from openpi_accel.errors import UserError
from openpi_accel.tools.inspect_checkpoint import compare, main, open_tree
from openpi_accel.types import Params
from tests.unit import toy


def write(folder: pathlib.Path, params: Params) -> pathlib.Path:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", {"params": params})
    return folder


def test_run_step_and_params_folder_are_the_same(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy.train(tmp_path, 3)
    seen = []
    for path in (tmp_path, tmp_path / "2", tmp_path / "2" / "params"):
        assert main([str(path), "--json"]) == 0
        seen.append(json.loads(capsys.readouterr().out))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0]["step"] == 2 and seen[0]["num_leaves"] == 2 and seen[0]["num_parameters"] == 16 * 64 + 64 * 4
    assert seen[0]["leaves"]["hidden/kernel"] == {"shape": [16, 64], "dtype": "float32", "num_bytes": 4096}
    assert main([str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "16x64" in table and "2 leaves, 1,280 parameters" in table


def test_compare(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    ones = jnp.ones((2, 2))
    first = write(tmp_path / "a", {"same": ones, "moved": ones, "cast": ones, "nan": ones.at[0, 0].set(jnp.nan)})
    moved = {"same": ones, "moved": ones.at[1, 1].set(4.0), "cast": ones.astype(jnp.bfloat16), "nan": ones}
    second = write(tmp_path / "b", moved)
    differences, faults = compare(open_tree(first), open_tree(second))
    assert not faults
    assert (differences["moved"].absolute, differences["moved"].relative) == (3.0, 0.75)
    assert differences["same"].absolute == differences["cast"].absolute == 0
    assert np.isinf(differences["nan"].absolute)
    assert main([str(first), "--compare", str(second)]) == 0
    assert "is inf in nan (inf where the largest entry is 1)" in capsys.readouterr().out


def test_a_leaf_near_zero_does_not_differ_by_millions(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "a", {"bias": jnp.full(3, 2e-4), "kernel": jnp.full(3, 2.0), "zero": jnp.zeros(3)})
    second = write(tmp_path / "b", {"bias": jnp.full(3, 1e-12), "kernel": jnp.full(3, 1.0), "zero": jnp.zeros(3)})
    for one, other in ((first, second), (second, first)):
        differences, _ = compare(open_tree(one), open_tree(other))
        assert differences["bias"].relative == pytest.approx(1) and differences["bias"].absolute == pytest.approx(2e-4)
        assert differences["kernel"].relative == 0.5 and differences["zero"].relative == 0
    assert main([str(first), "--compare", str(second)]) == 0
    out = capsys.readouterr().out
    assert "is 1 in bias (0.0002 where the largest entry is 0.0002)" in out and "12 bytes" in out


def test_other_names_or_shapes_exit_with_1(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "a", {"x": jnp.ones(2), "y": jnp.ones(3)})
    second = write(tmp_path / "b", {"x": jnp.ones(4), "z": jnp.ones(3)})
    assert main([str(first), "--compare", str(second), "--json"]) == 1
    faults = json.loads(capsys.readouterr().out)["compare"]["faults"]
    assert len(faults) == 3
    assert "x: (2,) in the first, (4,) in the second" in faults
    assert main([str(first), "--compare", str(second)]) == 1
    assert capsys.readouterr().out.count("differs: ") == 3


def test_nothing_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        main([str(tmp_path)])
    with pytest.raises(UserError, match="does not exist"):
        main([str(tmp_path / "x")])


@pytest.mark.shared
def test_upstream_s_golden(shared: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = shared / "goldens" / "pi05_tiny_fp32_orbax"
    assert main([str(golden), "--json", "--compare", str(golden / "5")]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["step"], content["num_leaves"], content["num_parameters"]) == (5, 51, 279568)
    assert all(gap["absolute"] == 0 for gap in content["compare"]["differences"].values())
