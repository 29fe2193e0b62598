"""A model that is wrong must fail parity, and a golden that is broken must be told from a model that is wrong."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_accel.errors import UserError
from openpi_accel.models.attention import gemma_attention, siglip_attention
from openpi_accel.models.masks import AttentionMask
from openpi_accel.models.ops import Ops
from openpi_accel.models.stack import ScanLayers
from openpi_accel.tools.golden import Golden, architecture_of, load_golden
from openpi_accel.tools.parity import Parity

REPO = pathlib.Path(__file__).resolve().parents[2]
PI0 = REPO / "tests" / "data" / "goldens" / "pi0_tiny_fp32.sample.npz"


def _sees_all(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    return gemma_attention(q, k, v, dataclasses.replace(mask, valid=jnp.ones_like(mask.valid)))


def _one_block(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    return gemma_attention(q, k, v, dataclasses.replace(mask, blocks=(sum(mask.blocks),)))


def _state_sees_actions(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    return gemma_attention(q, k, v, dataclasses.replace(mask, blocks=(mask.blocks[0], sum(mask.blocks[1:]))))


def _last_key_lost(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    return gemma_attention(q, k, v.at[:, -1].set(0), mask)


def _not_a_number(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    return gemma_attention(q, k, v, mask) * jnp.nan


def _unscaled(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return siglip_attention(q * 2, k, v)


@pytest.mark.parametrize(
    "ops",
    [
        Ops(gemma_attention=_sees_all),
        Ops(gemma_attention=_one_block),
        Ops(gemma_attention=_state_sees_actions),
        Ops(gemma_attention=_last_key_lost),
        Ops(gemma_attention=_not_a_number),
        Ops(siglip_attention=_unscaled),
        Ops(encode_cameras=lambda encode, images: {slot: encode(image[:, ::-1]) for slot, image in images.items()}),
    ],
    ids=["sees padding", "prefix sees actions", "state sees actions", "key lost", "nan", "siglip scale", "flipped"],
)
def test_broken_unit_fails(ops: Ops) -> None:
    result = Parity(load_golden([PI0]), ops=ops).run("velocity")
    assert result.status == "out of tolerance", result


def test_equivalent_unit_passes() -> None:
    keep_all = ScanLayers(policy=jax.checkpoint_policies.everything_saveable)
    result = Parity(load_golden([PI0]), ops=Ops(gemma_layers=keep_all, siglip_layers=keep_all)).run("velocity")
    assert result.status == "ok", result


def test_error_is_per_leaf() -> None:
    """A small leaf is not measured by the scale of a large one, and a zero leaf is held to an absolute bound."""
    golden = load_golden([PI0])
    parity = Parity(golden)
    suffix = golden["fwd/suffix_out"].copy()
    suffix[0, 0, 0] += 3e-5 * np.abs(suffix).max()
    wrong = Parity(Golden("wrong", golden.arrays | {"fwd/suffix_out": suffix})).leaves("outputs")
    assert [parity.error(leaf)[0] > parity.error(leaf)[1] for leaf in wrong] == [True]


def _save(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> pathlib.Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def _run(*args: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/parity.py", *map(str, args)]
    env = {"PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu", "PATH": ""}
    return subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=300)


def test_command_line(tmp_path: pathlib.Path) -> None:
    arrays = load_golden([PI0]).arrays
    good = _run(PI0, "--only", "suffix_tokens", "--only", "grads", "--json")
    assert good.returncode == 0, good.stderr
    answer = json.loads(good.stdout)
    assert answer["ok"] and [row["status"] for row in answer["groups"]] == ["ok", "absent"]

    shifted = arrays | {"fwd/suffix_tokens": arrays["fwd/suffix_tokens"] + 1e-3}
    bad = _run(_save(tmp_path / "shifted.npz", shifted), "--only", "suffix_tokens")
    assert bad.returncode == 1 and "OUT OF TOLERANCE" in bad.stdout

    nothing = _run(PI0, "--only", "grads")
    assert nothing.returncode == 2 and "nothing was compared" in nothing.stderr and "Traceback" not in nothing.stderr


def test_malformed_file_is_the_users_to_mend(tmp_path: pathlib.Path) -> None:
    arrays = load_golden([PI0]).arrays
    with pytest.raises(UserError, match="no file"):
        load_golden([tmp_path / "absent.npz"])
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "cut.npz").write_bytes(PI0.read_bytes()[:200_000])
    for name in ("text", "cut"):
        with pytest.raises(UserError, match="no readable"):
            load_golden([tmp_path / f"{name}.npz"])

    def without(key: str) -> dict[str, np.ndarray]:
        return {k: v for k, v in arrays.items() if k != key}

    for i, broken in enumerate((without("actions"), arrays | {"obs/state": arrays["obs/state"][:, :7]})):
        with pytest.raises(UserError):
            load_golden([_save(tmp_path / f"{i}.npz", broken)])
    embedding = "params/PaliGemma/llm/embedder/input_embedding"
    with pytest.raises(UserError, match="input_embedding"):
        architecture_of(Golden("g", without(embedding)))
    with pytest.raises(UserError, match="linear"):
        linear = "params/PaliGemma/llm/layers/mlp/linear"
        Parity(Golden("g", arrays | {linear: arrays[linear][:, :, :-1]}))
    with pytest.raises(UserError, match="suffix_tokens"):
        wrong = arrays | {"fwd/suffix_tokens": arrays["fwd/suffix_tokens"][:, :-1]}
        Parity(Golden("g", wrong)).run("suffix_tokens")
