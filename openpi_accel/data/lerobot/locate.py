"""Finds a dataset's folder on this machine. Never touches the network."""

import pathlib

from openpi_accel.config.environment import Environment
from openpi_accel.errors import UserError


def find_dataset(repo_id: str, path: str | None, environment: Environment) -> pathlib.Path:
    """The folder that holds `meta/info.json`.

    Looks at `path` alone if it is given; else at <HF_LEROBOT_HOME>/<repo id>, then at the Hub's snapshots (the main
    branch's, else the newest) in <HF_LEROBOT_HOME>/hub (lerobot's own since 0.4) and HF_HUB_CACHE.

    Raises:
        UserError: nothing there; says where it looked and which command fetches the dataset.
    """
    if path is not None:
        folder = pathlib.Path(path).expanduser()
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder}. Set DATA_PATH to the dataset's folder, or {_fetch(repo_id)}")
        return folder
    home = environment.hf_lerobot_home / repo_id
    if (home / "meta" / "info.json").is_file():
        return home
    caches = (environment.hf_lerobot_home / "hub", environment.hf_hub_cache)
    for cache in caches:
        snapshot = _snapshot(cache / ("datasets--" + repo_id.replace("/", "--")))
        if snapshot is not None:
            return snapshot
    looked = ", ".join(str(place) for place in (home, *caches))
    raise UserError(
        f"The dataset {repo_id} is not on this machine (looked in {looked}). "
        f"Set DATA_PATH to its folder if you have it elsewhere, or {_fetch(repo_id)}"
    )


def _fetch(repo_id: str) -> str:
    return f"fetch it with: hf download {repo_id} --repo-type dataset"


def _snapshot(repo: pathlib.Path) -> pathlib.Path | None:
    """The snapshot to read in one repository of the Hub's cache, if there is one."""
    main = repo / "refs" / "main"
    if main.is_file():
        snapshot = repo / "snapshots" / main.read_text().strip()
        if (snapshot / "meta" / "info.json").is_file():
            return snapshot
    whole = [folder for folder in (repo / "snapshots").glob("*") if (folder / "meta" / "info.json").is_file()]
    return max(whole, key=lambda folder: folder.stat().st_mtime, default=None)
