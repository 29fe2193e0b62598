"""Short texts between processes, for what all of them must agree on before they train together."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from openpi_accel.errors import UserError

# Every length of a gathered array is a program to compile; padding makes them few.
_PADDED_TO = 4096


def gather_texts(text: str) -> list[str]:
    """The texts of all processes, by rank; every process must call this at the same place. One process: nothing moves.

    Needs the same number of devices in every process (`same_program.check_devices`).
    """
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([len(data)], np.uint32))[:, 0]
    width = max(1, -(-int(lengths.max()) // _PADDED_TO)) * _PADDED_TO
    rows = multihost_utils.process_allgather(np.pad(data, (0, width - len(data))))
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def from_first(make: Callable[[], str]) -> str:
    """The text that process 0 makes, on every process. `make` runs there alone and must not raise: the others wait."""
    return gather_texts(make() if jax.process_index() == 0 else "")[0]


def together[T](make: Callable[[], T]) -> T:
    """What this process makes, once all have made theirs: the mistake of one node stops every node, at once.

    Raises:
        UserError: here or on another process.
    """
    try:
        made = make()
    except UserError as error:
        gather_texts(str(error))
        raise
    problems = gather_texts("")
    failed = {text: [rank for rank, other in enumerate(problems) if other == text] for text in problems if text}
    if failed:
        raise UserError("\n".join(f"{name_ranks(ranks)}: {text}" for text, ranks in failed.items()))
    return made


def name_ranks(ranks: list[int]) -> str:
    """Ascending ranks in words: `rank 3`, `ranks 1-3, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = (str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
