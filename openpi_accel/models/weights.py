"""Base weights: upstream's Orbax parameter checkpoints into our parameter tree, straight to its shards."""

import dataclasses
import hashlib
import pathlib
import shlex
from collections.abc import Callable, Mapping

import jax

from openpi_accel import tree
from openpi_accel.errors import UserError
from openpi_accel.orbax_tree import is_tree_folder, plain_paths, read_leaves, stored_leaves
from openpi_accel.types import Params

_ROOT = "params/"
_ADDRESS = "gs://"
_PI05_BASE = "gs://openpi-assets/checkpoints/pi05_base/params"
_FRESH = "To train from fresh weights on purpose: --weight-loader.params-path=None."


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsReport:
    """What happened to the names of a loaded checkpoint.

    Attributes:
        loaded: paths taken from the checkpoint.
        missing: paths of the model that the checkpoint lacks; they keep their fresh values.
        unexpected: paths of the checkpoint that the model has no use for; they were not read.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def find_params_folder(
    path: str | pathlib.Path, data_home: pathlib.Path | None = None, *, public: str | None = None
) -> pathlib.Path:
    """The folder of the parameter tree: `path` itself, or params/ in it.

    Args:
        path: a folder, or the gs:// address of public weights, which are then looked for where upstream keeps its
            downloads: gs://bucket/x is <data_home>/bucket/x. Nothing is downloaded.
        data_home: OPENPI_DATA_HOME.
        public: gs:// address of the weights that the config starts from, for messages; None is pi0.5's.

    Raises:
        UserError: there is none; with the commands after which there is.
    """
    address = str(path) if str(path).startswith(_ADDRESS) else public or _PI05_BASE
    if str(path).startswith(_ADDRESS):
        if data_home is None:
            raise UserError(f"{path} is an address, and training never downloads.\n{_fetch(address, None)}")
        local = data_home / str(path).removeprefix(_ADDRESS)
        if not local.is_dir():
            raise UserError(
                f"The base weights {path} are not on this machine (looked in {local}).\n{_fetch(address, local)}"
            )
        path = local
    folder = pathlib.Path(path).expanduser()
    for candidate in (folder, folder / "params"):
        if is_tree_folder(candidate):
            return candidate
    fetch = _fetch(address, folder)
    if not folder.is_dir():
        raise UserError(f"There are no base weights at {path}: the folder does not exist.\n{fetch}")
    raise UserError(f"{path} holds no Orbax parameters (neither it nor its params/ has a _METADATA file).\n{fetch}")


def _fetch(address: str, folder: pathlib.Path | None) -> str:
    """The commands after which `find_params_folder` finds the weights in `folder`."""
    name = address.rstrip("/").rpartition("/")[2]
    if folder is None:
        folder = pathlib.Path("DIR") / name
    parent = shlex.quote(str(folder.parent if folder.name == name else folder))
    return (
        "Fetch them once (public, 12 GB; gsutil -m cp -r takes the same arguments):\n"
        f"    mkdir -p {parent} && gcloud storage cp -r {address} {parent}/\n"
        "Or name the folder where they are: --weight-loader.params-path=FOLDER (launchers: "
        f"BASE_CHECKPOINT_PATH). {_FRESH}"
    )


def base_weights_fingerprint(folder: pathlib.Path) -> str:
    """A hash that other weights do not have, without reading them: of the tree's description and of the table of
    contents, which is another one with every save (where there is one: what was saved without OCDBT has none)."""
    described = [folder / name for name in ("_METADATA", "manifest.ocdbt")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in described if path.is_file())).hexdigest()


def load_base_params(
    path: str | pathlib.Path, target_shapes: Params, allow_missing: Callable[[str], bool]
) -> tuple[Params, WeightsReport]:
    """Reads each parameter in the target's dtype, straight to the target's sharding.

    Args:
        path: a params folder, or a folder with params/ in it.
        target_shapes: our parameter tree, leaves jax.ShapeDtypeStruct with shardings.
        allow_missing: whether a path may be absent from the checkpoint (the adapters of LoRA).

    Returns:
        The tree of the loaded leaves alone, without the missing ones, and a report.

    Raises:
        UserError: no such folder, names missing that may not be, or other shapes; lists all of them.
    """
    folder = find_params_folder(path)
    wanted: dict[str, jax.ShapeDtypeStruct] = tree.flatten(target_shapes)
    stored = stored_leaves(folder)
    raw = {plain.removeprefix(_ROOT): raw for plain, raw in plain_paths(stored).items()}

    missing = tuple(name for name in wanted if name not in raw)
    _check_missing(folder, wanted, [name for name in missing if not allow_missing(name)])
    _check_shapes(folder, wanted, {name: tuple(stored[raw[name]].shape) for name in wanted if name in raw})

    loaded = read_leaves(folder, {raw[name]: target for name, target in wanted.items() if name in raw})
    report = WeightsReport(
        loaded=tuple(name for name in wanted if name in raw),
        missing=missing,
        unexpected=tuple(sorted(name for name in raw if name not in wanted)),
    )
    return tree.unflatten({name: loaded[raw[name]] for name in report.loaded}), report


def _check_missing(folder: pathlib.Path, wanted: Mapping[str, object], missing: list[str]) -> None:
    if missing:
        raise UserError(
            f"{folder} lacks {len(missing)} of the model's {len(wanted)} parameters:\n    "
            + "\n    ".join(missing)
            + "\nThese weights are of another model: choose the config that they were trained with (pi05_* for pi0.5, "
            "pi0_* for pi0), or other weights with --weight-loader.params-path."
        )


def _check_shapes(
    folder: pathlib.Path, wanted: Mapping[str, jax.ShapeDtypeStruct], stored: Mapping[str, tuple[int, ...]]
) -> None:
    wrong = [
        f"{name}: the checkpoint has {shape}, the model {tuple(wanted[name].shape)}"
        for name, shape in stored.items()
        if shape != tuple(wanted[name].shape)
    ]
    if wrong:
        raise UserError(
            f"{folder} does not fit the model; {len(wrong)} parameters have another shape:\n    "
            + "\n    ".join(wrong)
            + "\nChoose the model variant that the weights were trained with."
        )
