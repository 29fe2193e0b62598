"""Freeze presets and filters."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from openpi_accel.config.schema import GEMMA_VARIANTS, Architecture, ModelConfig
from openpi_accel.errors import UserError
from openpi_accel.models.freeze import count_parameters, format_counts, trainable_predicate
from openpi_accel.models.pure import init_params
from openpi_accel.tree import flatten

TINY = ModelConfig(
    paligemma_variant="tiny", action_expert_variant="tiny_expert", vision_variant="tiny", vocab_size=512
).architecture
BOTH = dataclasses.replace(
    TINY, paligemma=GEMMA_VARIANTS["tiny_lora"], action_expert=GEMMA_VARIANTS["tiny_expert_lora"]
)
FIRST = dataclasses.replace(TINY, paligemma=GEMMA_VARIANTS["tiny_lora"])
SECOND = dataclasses.replace(TINY, action_expert=GEMMA_VARIANTS["tiny_expert_lora"])


def _trainable(spec: str, arch: Architecture) -> tuple[set[str], set[str]]:
    """(trained paths, frozen paths)."""
    shapes = jax.eval_shape(lambda: init_params(arch, jax.random.key(0)))
    predicate = trainable_predicate(spec, shapes, arch)
    paths = set(flatten(shapes))
    return {p for p in paths if predicate(p)}, {p for p in paths if not predicate(p)}


def test_lora_of_both_experts_trains_upstreams_leaves(data: pathlib.Path) -> None:
    golden = np.load(data / "goldens" / "pi05_tiny_lora.sample.npz")
    assert _trainable("auto", BOTH)[0] == set(golden["trainable"].tolist())


def test_lora_of_the_first_expert_leaves_the_second_alone() -> None:
    trained, frozen = _trainable("lora", FIRST)
    assert frozen and all(p.startswith("PaliGemma/llm/") and "lora" not in p and "_1/" not in p for p in frozen)
    assert "PaliGemma/llm/embedder/input_embedding" in frozen
    assert {"PaliGemma/llm/layers/mlp_1/linear", "PaliGemma/llm/layers/mlp/linear_lora_a"} <= trained


def test_lora_of_the_second_expert_leaves_the_first_alone() -> None:
    trained, frozen = _trainable("lora", SECOND)
    assert frozen and all("_1/" in p and p.startswith("PaliGemma/llm/") and "lora" not in p for p in frozen)
    assert {"PaliGemma/llm/layers/mlp/linear", "PaliGemma/llm/embedder/input_embedding"} <= trained
    assert "PaliGemma/llm/final_norm_1/Dense_0/kernel" in frozen


def test_presets() -> None:
    assert not _trainable("none", TINY)[1] and not _trainable("auto", TINY)[1]
    vision, llm = _trainable("vision", TINY)[1], _trainable("llm", TINY)[1]
    assert vision and all(p.startswith("PaliGemma/img/") for p in vision)
    assert llm and all(p.startswith("PaliGemma/llm/") and "_1/" not in p for p in llm)
    trained, frozen = _trainable("all_but_action_expert", TINY)
    assert frozen == vision | llm
    assert all("_1/" in p or not p.startswith("PaliGemma/") for p in trained)


def test_regular_expression_must_match_whole_paths() -> None:
    assert _trainable(".*/embedder/.*", TINY)[1] == {"PaliGemma/llm/embedder/input_embedding"}
    for spec in ("embedder", ".*", "[", "visoin"):
        with pytest.raises(UserError, match="--freeze="):
            _trainable(spec, TINY)


def test_lora_without_adapters_is_refused() -> None:
    with pytest.raises(UserError, match="neither expert has adapters"):
        _trainable("lora", TINY)


def test_counts_add_up() -> None:
    shapes = jax.eval_shape(lambda: init_params(BOTH, jax.random.key(0)))
    counts = count_parameters(shapes, trainable_predicate("lora", shapes, BOTH))
    total = counts[-1]
    assert total.module == "total" and total.total == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert total.total == sum(c.total for c in counts[:-1])
    assert total.trainable == sum(c.trainable for c in counts[:-1]) < total.total
    by_name = {c.module: c for c in counts}
    assert by_name["first expert"].trainable == 0 and by_name["adapters"].trainable == by_name["adapters"].total > 0
    assert f"{total.total:,}" in format_counts(counts)
