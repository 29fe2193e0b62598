"""Base weights: upstream's golden checkpoint, and every way in which a checkpoint may not fit."""

import gc
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from openpi_accel import tree
from openpi_accel.errors import UserError
from openpi_accel.models.weights import base_weights_fingerprint, find_params_folder, load_base_params
from openpi_accel.orbax_tree import plain_paths
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.parallel.sharding import state_shardings
from openpi_accel.types import Params

SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def never(path: str) -> bool:
    return False


def shapes_of(params: Params, dtype: Any = None) -> Params:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=SHARDING), params)


def small_params() -> Params:
    """With SigLIP's projection that is called `value`."""
    return {
        "attention": {"value": {"kernel": jnp.arange(6.0).reshape(2, 3)}, "key": {"kernel": jnp.ones((2, 3)) / 3}},
        "out": {"w": jnp.arange(4.0)},
    }


def write(folder: pathlib.Path, params: Params, *, value_keys: bool = True) -> pathlib.Path:
    stored = jax.tree.map(lambda leaf: {"value": leaf}, params) if value_keys else params
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", {"params": stored})
    return folder / "params"


@pytest.mark.shared
@pytest.mark.parametrize("sub", ["5", "5/params"])
def test_golden_checkpoint_loads_to_the_last_bit(shared: pathlib.Path, sub: str) -> None:
    with np.load(shared / "goldens" / "pi05_tiny_fp32_orbax_expect.npz") as file:
        expected = {name.removeprefix("ema/"): file[name] for name in file.files if name.startswith("ema/")}
    targets = shapes_of(tree.unflatten(expected))
    params, report = load_base_params(shared / "goldens" / "pi05_tiny_fp32_orbax" / sub, targets, never)
    got = tree.flatten(params)
    assert set(got) == set(expected)
    assert set(report.loaded) == set(expected) and not report.missing and not report.unexpected
    for name, leaf in expected.items():
        assert got[name].dtype == jnp.float32
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)


@pytest.mark.parametrize("value_keys", [True, False])
def test_the_key_value_is_dropped_only_where_all_leaves_have_it(tmp_path: pathlib.Path, value_keys: bool) -> None:
    params = small_params()
    loaded, _ = load_base_params(write(tmp_path, params, value_keys=value_keys), shapes_of(params), never)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    np.testing.assert_array_equal(loaded["attention"]["value"]["kernel"], params["attention"]["value"]["kernel"])


def test_plain_paths() -> None:
    assert plain_paths(["a/value", "b/value/kernel/value"]) == {
        "a": "a/value",
        "b/value/kernel": "b/value/kernel/value",
    }
    assert plain_paths(["a/value", "b/value/kernel"]) == {"a/value": "a/value", "b/value/kernel": "b/value/kernel"}


def test_leaves_go_to_the_target_s_dtype_and_shards(tmp_path: pathlib.Path) -> None:
    assert jax.device_count() == 8
    params = {"w": jax.random.normal(jax.random.key(0), (16, 8))}
    shardings = state_shardings(params, make_mesh(8), min_num_elements=1)
    targets = {"w": jax.ShapeDtypeStruct((16, 8), jnp.bfloat16, sharding=shardings["w"])}
    loaded, _ = load_base_params(write(tmp_path, params), targets, never)
    assert loaded["w"].sharding == shardings["w"]
    assert [shard.data.shape for shard in loaded["w"].addressable_shards] == [(2, 8)] * 8
    np.testing.assert_array_equal(loaded["w"], params["w"].astype(jnp.bfloat16))


def test_extra_leaves_are_dropped_and_adapters_may_be_missing(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path, small_params())
    targets = shapes_of({"out": {"w": jnp.zeros(4), "lora_a": jnp.zeros((4, 2))}})
    loaded, report = load_base_params(folder, targets, lambda path: "lora" in path)
    assert list(tree.flatten(loaded)) == ["out/w"]
    assert report.missing == ("out/lora_a",)
    assert report.unexpected == ("attention/key/kernel", "attention/value/kernel")
    with pytest.raises(UserError, match="lacks 1 of the model's 2 parameters:\n    out/lora_a\n"):
        load_base_params(folder, targets, never)


def test_all_wrong_shapes_are_listed(tmp_path: pathlib.Path) -> None:
    targets = shapes_of(small_params())
    targets["out"]["w"] = jax.ShapeDtypeStruct((5,), jnp.float32, sharding=SHARDING)
    targets["attention"]["key"]["kernel"] = jax.ShapeDtypeStruct((3, 2), jnp.float32, sharding=SHARDING)
    with pytest.raises(UserError, match=r"2 parameters have another shape") as error:
        load_base_params(write(tmp_path, small_params()), targets, never)
    assert "attention/key/kernel: the checkpoint has (2, 3), the model (3, 2)" in str(error.value)
    assert "out/w: the checkpoint has (4,), the model (5,)" in str(error.value)


def test_missing_weights_come_with_the_command_that_fetches_them(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path, "gs://openpi-assets/checkpoints/pi05_base/params"):
        with pytest.raises(UserError, match=r"gcloud storage cp -r gs://openpi-assets/.*pi05_base") as error:
            find_params_folder(path)
        assert "BASE_CHECKPOINT_PATH" in str(error.value)


# Orbax never awaits the other reads once one has failed; they are collected here, not in a later test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_is_named(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path, small_params())
    files = [path for path in folder.rglob("d/*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(b"")
    with pytest.raises(UserError, match="damaged or incomplete: copy them again"):
        load_base_params(folder, shapes_of(small_params()), never)
    (folder / "_METADATA").write_text("{")
    with pytest.raises(UserError, match="damaged or incomplete"):
        load_base_params(folder, shapes_of(small_params()), never)
    gc.collect()


def test_a_public_address_is_looked_for_among_upstreams_downloads(tmp_path):
    address = "gs://openpi-assets/checkpoints/pi05_base/params"
    with pytest.raises(UserError, match=r"looked in .*openpi-assets/checkpoints/pi05_base/params"):
        find_params_folder(address, tmp_path)
    folder = tmp_path / "openpi-assets/checkpoints/pi05_base/params"
    folder.mkdir(parents=True)
    (folder / "_METADATA").write_text("{}")
    assert find_params_folder(address, tmp_path) == folder


def test_the_fingerprint_goes_with_a_copy_and_not_with_other_weights(tmp_path: pathlib.Path) -> None:
    first = write(tmp_path / "first", small_params())
    other = write(tmp_path / "other", jax.tree.map(lambda leaf: leaf + 1, small_params()))  # the same names and shapes
    copy = pathlib.Path(shutil.copytree(first, tmp_path / "copy"))
    assert base_weights_fingerprint(first) == base_weights_fingerprint(copy) != base_weights_fingerprint(other)
