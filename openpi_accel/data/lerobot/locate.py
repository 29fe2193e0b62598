"""Finds a dataset's folder on this machine. Never touches the network."""

import pathlib
import shlex

from openpi_accel.config.environment import Environment
from openpi_accel.config.schema import LOCAL_REPO_ID
from openpi_accel.errors import UserError

# What the users of most scripts set; others name their own (`option`).
DATASET_OPTION = "--data.path (launchers: DATA_PATH)"
# Datasets that are surely on the Hub, and their size; any other name may be private or made up.
_PUBLIC = {"physical-intelligence/libero": "about 36 GB"}


def find_dataset(
    repo_id: str, path: str | None, environment: Environment, *, option: str = DATASET_OPTION
) -> pathlib.Path:
    """The folder that holds `meta/info.json`.

    Looks at `path` alone if it is given; else at <HF_LEROBOT_HOME>/<repo id>, then at the Hub's snapshots (the main
    branch's, else the newest) in <HF_LEROBOT_HOME>/hub (lerobot's own since 0.4) and HF_HUB_CACHE.

    Args:
        repo_id: the dataset's name.
        path: its folder, if it is known.
        environment: where to look.
        option: by which the tool's user says where the dataset is, for messages.

    Raises:
        UserError: nothing there; says where it looked and which command fetches the dataset.
    """
    if path is not None:
        folder = pathlib.Path(path).expanduser()
        if not folder.is_dir():
            raise UserError(
                f"There is no folder {folder}. Give the dataset's folder: {option}.{_fetch(repo_id, folder)}"
            )
        return folder
    home = environment.hf_lerobot_home / repo_id
    if (home / "meta" / "info.json").is_file():
        return home
    caches = (environment.hf_lerobot_home / "hub", environment.hf_hub_cache)
    for cache in caches:
        snapshot = _snapshot(cache / ("datasets--" + repo_id.replace("/", "--")))
        if snapshot is not None:
            return snapshot
    if repo_id == LOCAL_REPO_ID:
        raise UserError(f"No dataset is named. Give its folder: {option}.")
    looked = ", ".join(str(place) for place in (home, *caches))
    raise UserError(
        f"The dataset {repo_id} is not on this machine (looked in {looked}). If it lies elsewhere, give its folder: "
        f"{option}.{_fetch(repo_id, None)}"
    )


def _fetch(repo_id: str, folder: pathlib.Path | None) -> str:
    """The command after which `find_dataset` finds it: into the folder asked for, else into the Hub's cache."""
    if repo_id == LOCAL_REPO_ID:
        return ""
    size = _PUBLIC.get(repo_id)
    if size is not None:
        words = f"Or fetch it once ({size})"
    else:
        words = f"Or, if {repo_id} is a dataset on the Hugging Face Hub (private ones need `hf auth login`), fetch it"
    target = "" if folder is None else f" --local-dir {shlex.quote(str(folder))}"
    return f" {words}:\n    hf download {repo_id} --repo-type dataset{target}"


def _snapshot(repo: pathlib.Path) -> pathlib.Path | None:
    """The snapshot to read in one repository of the Hub's cache, if there is one."""
    main = repo / "refs" / "main"
    if main.is_file():
        snapshot = repo / "snapshots" / main.read_text().strip()
        if (snapshot / "meta" / "info.json").is_file():
            return snapshot
    whole = [folder for folder in (repo / "snapshots").glob("*") if (folder / "meta" / "info.json").is_file()]
    return max(whole, key=lambda folder: folder.stat().st_mtime, default=None)
