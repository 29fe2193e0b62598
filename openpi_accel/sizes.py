"""Sizes in bytes, for people."""

_UNITS = ("bytes", "KiB", "MiB", "GiB")


def format_bytes(num_bytes: float) -> str:
    """`1.5 GiB`, `35.2 MiB`, `712 bytes`: the largest of these units that leaves at least 1 before the point."""
    power = 0
    while power < len(_UNITS) - 1 and abs(num_bytes) >= 1024:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.0f} {_UNITS[0]}" if power == 0 else f"{num_bytes:.1f} {_UNITS[power]}"
