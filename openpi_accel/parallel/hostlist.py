"""Slurm's short form of host names: node[01-03,07],gpu5 is node01, node02, node03, node07, gpu5."""

import itertools
import re

from openpi_accel.errors import UserError

_ENTRY = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MOST_HOSTS = 100_000


def expand_hosts(text: str, variable: str) -> tuple[str, ...]:
    """Every host of a list, in its order.

    A name may hold several brackets (rack[1-2]node[1-4]); the last one runs fastest. Leading zeros are kept.

    Args:
        variable: where the list comes from, for the message.

    Raises:
        UserError: this is no such list.
    """
    hosts: list[str] = []
    at = 0
    while True:
        entry = _ENTRY.match(text, at)
        if entry is None:
            raise _wrong(text, variable)
        parts = re.split(r"\[([^\[\]]*)\]", entry.group())
        # Texts stand at even places, what was in brackets at odd ones.
        choices = [_numbers(part, text, variable) if i % 2 else [part] for i, part in enumerate(parts)]
        hosts += ["".join(pieces) for pieces in itertools.product(*choices)]
        at = entry.end()
        if at == len(text):
            return tuple(hosts)
        if text[at] != ",":
            raise _wrong(text, variable)
        at += 1


def _numbers(part: str, text: str, variable: str) -> list[str]:
    numbers: list[str] = []
    for piece in part.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _wrong(text, variable)
        first, last = match.group(1), match.group(2) or match.group(1)
        if not 0 <= int(last) - int(first) < _MOST_HOSTS:
            raise _wrong(text, variable)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _wrong(text: str, variable: str) -> UserError:
    return UserError(
        f"{variable}={text} is no list of hosts; Slurm writes for example {variable}=node[01-03,07],gpu5. Set "
        "MASTER_ADDR to the first node's name instead."
    )
