"""Do all processes run the same program? Where they do not, collectives hang or, worse, train on different things."""

import dataclasses
import hashlib
import json
import pathlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib

from openpi_accel import tree
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig
from openpi_accel.errors import UserError
from openpi_accel.parallel.exchange import gather_texts, name_ranks

# What may differ between nodes without harm, so that it is not compared.
MAY_DIFFER = frozenset(
    {
        # Where files lie on this node, and a name made of that. What is in the files is compared instead: dataset,
        # mixture, statistics, tokenizer, base weights; a packed cache is held against its dataset when it is opened.
        "data/path",
        "data/mixture",
        "data/asset_id",
        "data/tokenizer_path",
        "data/packed",
        "data/keep_frames",
        "assets_base_dir",
        "weight_loader/params_path",
        # Shared storage may be mounted elsewhere; whether it is shared is tried out (`shared_storage`).
        "checkpoint_base_dir",
        # How many hands and buffers a node has for the same work; no sample depends on them.
        "num_workers",
        "data/prefetch_batches",
        # Only rank 0 acts by these.
        "shared_storage_timeout_s",
        "wandb_enabled",
        "project_name",
    }
)
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_SHOWN_LENGTH = 60  # a longer value is compared and shown as a hash
_HASHED = "sha256:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A field in which some ranks differ from rank 0.

    Attributes:
        field: its name.
        first: its value on rank 0; None where rank 0 lacks it.
        others: value -> the ranks that have it, ascending.
    """

    field: str
    first: str | None
    others: Mapping[str | None, list[int]]

    def __str__(self) -> str:
        if any(value is not None and value.startswith(_HASHED) for value in (self.first, *self.others)):
            return f"{self.field}: not rank 0's on {name_ranks(sorted(r for rs in self.others.values() for r in rs))}"
        values = [(self.first, [0]), *self.others.items()]
        return f"{self.field}: " + "; ".join(
            f"{'absent' if value is None else value} on {name_ranks(ranks)}" for value, ranks in values
        )


def differences(by_rank: Mapping[int, Mapping[str, str]]) -> list[Difference]:
    """Rank -> field -> value, for all ranks, to the fields in which ranks differ from rank 0; pure."""
    found = []
    for field in dict.fromkeys(name for rank in sorted(by_rank) for name in by_rank[rank]):
        first = by_rank[0].get(field)
        others: dict[str | None, list[int]] = {}
        for rank in sorted(by_rank):
            if (value := by_rank[rank].get(field)) != first:
                others.setdefault(value, []).append(rank)
        if others:
            found.append(Difference(field=field, first=first, others=others))
    return found


def config_fields(config: TrainConfig) -> dict[str, Any]:
    """Option of the command line -> value, without what MAY_DIFFER."""
    fields = tree.flatten(dataclasses.asdict(config))
    return {
        "--" + path.replace("/", ".").replace("_", "-"): value
        for path, value in fields.items()
        if path not in MAY_DIFFER
    }


def acceleration_fields(acceleration: Acceleration) -> dict[str, Any]:
    """Variable of the environment -> value."""
    return {f"OPENPI_{name.upper()}": value for name, value in dataclasses.asdict(acceleration).items()}


def code_hash(package: pathlib.Path) -> str:
    """A hash over path and text of every module below the folder."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def check_start(config: TrainConfig, acceleration: Acceleration) -> None:
    """The same devices, code, JAX, options and switches everywhere? Comes first, as what follows may depend on any.

    Raises:
        UserError: on every process alike; names the fields, the ranks, and the values where they are short.
    """
    if jax.process_count() == 1:
        return
    check_devices({device.id: (device.process_index, device.device_kind) for device in jax.devices()})
    check_same(
        {
            "code of openpi_accel": code_hash(_PACKAGE),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            **config_fields(config),
            **acceleration_fields(acceleration),
        }
    )


def check_devices(devices: Mapping[int, tuple[int, str]]) -> None:
    """As many devices of the same kind in every process? JAX tells each process all of them, so nothing is exchanged.

    Args:
        devices: id -> (rank, kind).

    Raises:
        UserError: the processes have other devices.
    """
    counts: dict[int, Counter[str]] = {}
    for rank, kind in devices.values():
        counts.setdefault(rank, Counter())[kind] += 1
    texts = {rank: " + ".join(f"{n} x {kind}" for kind, n in sorted(c.items())) for rank, c in counts.items()}
    _refuse(differences({rank: {"devices": text} for rank, text in texts.items()}))


def check_same(fields: Mapping[str, Any]) -> None:
    """Are these fields (name -> JSON value) the same on all processes? Nothing is exchanged where there is one.

    Raises:
        UserError: as `check_start`.
    """
    texts = gather_texts(json.dumps({name: _short(value) for name, value in fields.items()}))
    _refuse(differences({rank: json.loads(text) for rank, text in enumerate(texts)}))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN_LENGTH else _HASHED + hashlib.sha256(text.encode()).hexdigest()


def _refuse(found: list[Difference]) -> None:
    if found:
        lines = "".join(f"\n    {difference}" for difference in found)
        raise UserError(
            f"The processes do not run the same program:{lines}\n"
            "Start the same command on every node, with the same OPENPI_ variables, the same copy of this project and "
            "its Python packages, the same dataset, statistics, tokenizer and base weights, and the same GPUs."
        )
