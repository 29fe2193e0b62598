"""What is compared between processes, what is not, and what the user reads of a difference."""

import dataclasses
import pathlib

import jax
import pytest

from openpi_accel import tree
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.presets import get_preset
from openpi_accel.errors import UserError
from openpi_accel.parallel import exchange, same_program
from openpi_accel.parallel.same_program import (
    MAY_DIFFER,
    acceleration_fields,
    check_devices,
    check_same,
    check_start,
    code_hash,
    config_fields,
    differences,
)

CONFIG = get_preset("pi05_libero")


def test_ranks_are_named_in_spans() -> None:
    assert exchange.name_ranks([3]) == "rank 3"
    assert exchange.name_ranks([1, 2, 3, 7, 9, 10]) == "ranks 1-3, 7, 9-10"


def test_differences_are_grouped_by_value() -> None:
    same = {"jax": "0.11.2", "code": "sha256:ab"}
    assert differences({0: same, 1: dict(same)}) == [] == differences({0: same})
    found = differences(
        {2: same | {"jax": "0.5.3"}, 0: same, 1: same | {"jax": "0.5.3"}, 3: {"jax": "0.6", "code": "sha256:cd"}}
    )
    assert [str(difference) for difference in found] == [
        "jax: 0.11.2 on rank 0; 0.5.3 on ranks 1-2; 0.6 on rank 3",
        "code: not rank 0's on rank 3",
    ]


def test_a_field_that_one_side_lacks_is_a_difference() -> None:
    found = differences({0: {"a": "1"}, 1: {"a": "1", "b": "2"}, 2: {}})
    assert [str(difference) for difference in found] == [
        "a: 1 on rank 0; absent on rank 2",
        "b: absent on rank 0; 2 on rank 1",
    ]


def test_what_may_differ_exists_and_the_rest_is_compared() -> None:
    paths = set(tree.flatten(dataclasses.asdict(CONFIG)))
    assert paths >= MAY_DIFFER
    assert len(config_fields(CONFIG)) == len(paths) - len(MAY_DIFFER)
    moved = dataclasses.replace(
        CONFIG, checkpoint_base_dir="elsewhere", num_workers=9, data=dataclasses.replace(CONFIG.data, path="elsewhere")
    )
    assert config_fields(moved) == config_fields(CONFIG)
    other = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, val_fraction=0.5), resume=True)
    changed = {name for name, value in config_fields(other).items() if value != config_fields(CONFIG)[name]}
    assert changed == {"--data.val-fraction", "--resume"}


def test_switches_go_by_their_variables() -> None:
    fields = acceleration_fields(Acceleration(flash_attn=True))
    assert fields["OPENPI_FLASH_ATTN"] is True and fields["OPENPI_SKIP_IMAGES"] == ()
    values = {name: str(int(value)) for name, value in fields.items() if isinstance(value, bool)}
    assert Acceleration.from_env(values) == Acceleration(flash_attn=True)


def test_code_is_hashed_by_place_and_text(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    first = code_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("no code")
    assert code_hash(tmp_path) == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    moved = code_hash(tmp_path)
    (tmp_path / "b.py").write_text("x = 2\n")
    assert len({first, moved, code_hash(tmp_path)}) == 3


def test_other_devices_are_refused() -> None:
    check_devices({0: (0, "H200"), 1: (0, "H200"), 2: (1, "H200"), 3: (1, "H200")})
    with pytest.raises(UserError, match=r"devices: 2 x H200 on rank 0; 1 x H200 on rank 1\n"):
        check_devices({0: (0, "H200"), 1: (0, "H200"), 2: (1, "H200")})
    with pytest.raises(UserError, match=r"devices: 1 x H200 on rank 0; 1 x A100 on rank 1\n"):
        check_devices({0: (0, "H200"), 1: (1, "A100")})


def test_a_long_value_is_only_said_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another(text: str) -> list[str]:
        return [text, text.replace("first", "second"), text]

    monkeypatch.setattr(same_program, "gather_texts", with_another)
    check_same({"prompt": "the same"})
    with pytest.raises(UserError, match=r"same program:\n    prompt: first on rank 0; second on rank 1\n"):
        check_same({"prompt": "first", "seed": 1})
    gathered: list[str] = []
    monkeypatch.setattr(same_program, "gather_texts", lambda text: gathered.append(text) or [text])
    check_same({"dataset": "f" * 64})
    assert "sha256:" in gathered[0] and "ffff" not in gathered[0]


def test_one_process_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an exchange with nobody")

    monkeypatch.setattr(exchange.multihost_utils, "process_allgather", refuse)
    assert jax.process_count() == 1
    check_start(CONFIG, Acceleration())
    check_same({"a": 1})
    assert exchange.from_first(lambda: "ä") == "ä"
