"""`<config> --options` -> TrainConfig, with tyro; shared by every script that takes a training config."""

from collections.abc import Sequence

import tyro

from openpi_accel.config.presets import PRESETS, get_preset
from openpi_accel.config.resumed import saved_options
from openpi_accel.config.schema import TrainConfig
from openpi_accel.errors import UserError

# Short spellings of nested options.
_ALIASES = {
    "--allow-truncation": "--data.allow-truncation",
    "--no-allow-truncation": "--data.no-allow-truncation",
}


def parse_train_config(argv: Sequence[str], *, prog: str, description: str) -> TrainConfig:
    """Reads a config name and its overrides; those of --resume stand over the options of the run that is resumed.

    Raises:
        UserError: no or an unknown config name, or values that contradict each other. For an unknown option tyro itself
            prints what is close to it and exits with code 2.
    """
    if not argv or argv[0] in ("-h", "--help"):
        names = "\n".join(f"  {name}" for name in PRESETS)
        usage = f"usage: {prog} <config> [--options]"
        text = f"{usage}\n\n{description}\n\nconfigs:\n{names}\n\nOptions: {prog} <config> --help"
        if argv:
            print(text)
            raise SystemExit(0)
        raise UserError(f"a config name is missing.\n{text}")
    if argv[0].startswith("-"):
        raise UserError(
            f"the config name comes first: {prog} <config> {' '.join(argv)}. Configs: {', '.join(PRESETS)}."
        )
    preset = get_preset(argv[0])
    return override(
        saved_options(preset, argv[1:]) or preset, argv[1:], prog=f"{prog} {argv[0]}", description=description
    )


def override(config: TrainConfig, argv: Sequence[str], *, prog: str, description: str) -> TrainConfig:
    """`config` with the options of `argv` over it."""
    args = [_alias(arg) for arg in argv]
    parsed = tyro.cli(
        TrainConfig,
        args=args,
        prog=prog,
        description=description,
        default=config,
        config=(tyro.conf.AvoidSubcommands,),
    )
    if parsed.name != config.name:
        raise UserError(f"--name is fixed: folders are called by it. Start the config that you mean: {prog} …")
    return parsed


def _alias(arg: str) -> str:
    name, equals, value = arg.partition("=")
    return _ALIASES.get(name, name) + equals + value
