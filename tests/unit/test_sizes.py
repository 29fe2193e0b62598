"""Sizes for people: never 0.0 of something that is there."""

import pytest

from openpi_accel.sizes import format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (36_900_000, "35.2 MiB"), (1.5 * 2**30, "1.5 GiB"),
     (400 * 2**40, "409600.0 GiB")],
)  # fmt: skip
def test_the_unit_goes_with_the_size(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
