"""What one check of the preflight says."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

Level = Literal["ok", "warning", "error", "unknown"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        level: error where training cannot work like this, warning where it may not or only slowly, unknown where
            nothing can be said.
        seen: what is there.
        advice: what to do about it; empty where there is nothing to do.
    """

    name: str
    level: Level
    seen: str
    advice: str = ""


Check = Callable[[], Finding | Sequence[Finding]]


def examine(checks: Sequence[tuple[str, Check]]) -> list[Finding]:
    """Makes every check, in order. One that fails by itself says so and stops no other: a preflight must never be the
    reason why a healthy node does not start."""
    findings: list[Finding] = []
    for name, check in checks:
        try:
            found = check()
        except Exception as error:
            found = Finding(name=name, level="unknown", seen=f"the check failed: {type(error).__name__}: {error}")
        findings += [found] if isinstance(found, Finding) else found
    return findings
