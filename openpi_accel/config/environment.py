"""Where files are looked for, from the variables that upstream and its libraries define."""

import dataclasses
import pathlib
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """Folders outside the project.

    Attributes:
        openpi_data_home: OPENPI_DATA_HOME, default ~/.cache/openpi; holds big_vision/paligemma_tokenizer.model.
        hf_lerobot_home: HF_LEROBOT_HOME, default <HF_HOME>/lerobot; holds datasets as <repo id> folders.
        hf_hub_cache: HF_HUB_CACHE, default <HF_HOME>/hub; holds the Hub's snapshots.
        openpi_cache_home: OPENPI_CACHE_HOME, default ~/.cache/openpi_accel; holds what is made from datasets and can be
            deleted at any time.
    """

    openpi_data_home: pathlib.Path
    hf_lerobot_home: pathlib.Path
    hf_hub_cache: pathlib.Path
    openpi_cache_home: pathlib.Path

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Environment":
        """Pure: reads only `env`."""
        home = pathlib.Path(env.get("HOME") or "/")
        cache = pathlib.Path(env.get("XDG_CACHE_HOME") or home / ".cache")
        hf_home = pathlib.Path(env.get("HF_HOME") or cache / "huggingface")
        return cls(
            openpi_data_home=pathlib.Path(env.get("OPENPI_DATA_HOME") or home / ".cache" / "openpi"),
            hf_lerobot_home=pathlib.Path(env.get("HF_LEROBOT_HOME") or hf_home / "lerobot"),
            hf_hub_cache=pathlib.Path(env.get("HF_HUB_CACHE") or hf_home / "hub"),
            openpi_cache_home=pathlib.Path(env.get("OPENPI_CACHE_HOME") or cache / "openpi_accel"),
        )
