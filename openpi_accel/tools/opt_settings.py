"""What run_opt.sh turns on where there is a GPU, for tools that must know it without starting it."""

import dataclasses
from collections.abc import Mapping, Sequence

from openpi_accel.accel.catalog import CATALOG
from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.schema import TrainConfig

# The prompt length that is planned with where the data decide (auto): upstream's for pi0.5, which few data exceed.
ASSUMED_PROMPT = 200
_IN_OPT = tuple(entry for entry in CATALOG if entry.in_opt)


def opt_environment(config_name: str) -> dict[str, str]:
    """The OPENPI_ switches of the step, as the launcher sets them for this config."""
    switches = {name: value for entry in _IN_OPT for name, value in entry.environment.items()}
    return switches if "libero" in config_name else switches | {"OPENPI_SKIP_IMAGES": "auto"}


def opt_arguments(config_name: str) -> list[str]:
    """The train options of the step, as the launcher gives them for this config."""
    length = "28" if "libero" in config_name else "auto"
    return [*(word for entry in _IN_OPT for word in entry.arguments), "--model.max-token-len", length]


def chosen_settings(
    argv: Sequence[str], env: Mapping[str, str], *, plain: bool, prog: str, description: str, keep_auto: bool = False
) -> tuple[TrainConfig, Acceleration]:
    """The config of `argv` and the switches, as run_opt.sh (or, if `plain`, run_baseline.sh) would train them; what the
    user gives wins. A prompt length that the data would decide becomes ASSUMED_PROMPT, unless `keep_auto`.

    Raises:
        UserError: no such config, or values that contradict each other.
    """
    named = bool(argv) and not argv[0].startswith("-") and not plain
    words = [argv[0], *opt_arguments(argv[0]), *argv[1:]] if named else list(argv)
    config = parse_train_config(words, prog=prog, description=description)
    acceleration = Acceleration.from_env((opt_environment(config.name) if named else {}) | dict(env))
    if not isinstance(config.model.max_token_len, int) and not keep_auto:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, max_token_len=ASSUMED_PROMPT))
    return config, acceleration
