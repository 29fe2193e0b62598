"""Computes a config's normalisation statistics from the dataset's numeric columns; opens no image or video."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated

import numpy as np
import rich.console
import rich.progress
import rich.table
import tyro

from openpi_accel.config.environment import Environment
from openpi_accel.config.presets import PRESETS, get_preset
from openpi_accel.config.schema import TrainConfig
from openpi_accel.data.lerobot.dataset import LeRobotDataset, open_dataset
from openpi_accel.data.lerobot.locate import find_dataset
from openpi_accel.data.mapping import NumericColumns, resolve_columns
from openpi_accel.data.mixture_file import read_mixture
from openpi_accel.data.norm_stats import (
    ComputedFor,
    NormStats,
    narrow_range_warnings,
    norm_stats_path,
    save_norm_stats,
    with_min_range,
)
from openpi_accel.data.rows import numeric_column, reached_rows, require_finite, training_rows
from openpi_accel.data.statistics import action_statistics, fingerprint, state_statistics
from openpi_accel.data.stats_command import stats_command
from openpi_accel.errors import UserError

_PROG = "compute_norm_stats.py"
_SEED = 0  # of the choice of frames under --max-frames


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeArgs:
    """Normalisation statistics of a config's dataset, written to <assets-base-dir>/<config>/<asset id>/norm_stats.json.

    The options of the config itself are taken too, for example --data.path, --data.state-key, --model.action-horizon.
    --num-workers is the number of threads that sort.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    config_name: str
    """Name of the config."""
    max_frames: int | None = None
    """Use this many frames, drawn evenly at random with a fixed seed; None uses every frame."""
    min_state_range: float = 0.0
    """Floor under the state's q99 - q01 (and accordingly under std), for dimensions that hardly move; 0 sets none."""
    min_action_range: float = 0.0
    """The same for the actions."""


def parse_args(argv: Sequence[str]) -> ComputeArgs:
    """Reads the config's name first, because it gives all other options their defaults: --config-name, as upstream has
    it, or the first word, as the other scripts have it.

    Raises:
        UserError: no or an unknown config name, or a value out of range.
    """
    if argv and not argv[0].startswith("-"):
        argv = ["--config-name", *argv]
    name = _config_name(argv)
    if name is None and not {"-h", "--help"} & set(argv):
        raise UserError(f"--config-name is missing; the configs are {', '.join(PRESETS)}.")
    args = tyro.cli(
        ComputeArgs,
        args=list(argv),
        prog=_PROG,
        default=ComputeArgs(config=get_preset(name or next(iter(PRESETS))), config_name=name or tyro.MISSING),
        config=(tyro.conf.AvoidSubcommands,),
    )
    if args.config.name != get_preset(args.config_name).name:
        raise UserError("--name is fixed: folders are called by it. Choose the config by --config-name.")
    if args.max_frames is not None and args.max_frames < 1:
        raise UserError(f"--max-frames is {args.max_frames}; it must be at least 1.")
    for option, floor in (("state", args.min_state_range), ("action", args.min_action_range)):
        if not floor >= 0:
            raise UserError(f"--min-{option}-range is {floor}; it must be 0 or more.")
    return args


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """The script. DATA_PATH stands in for --data.path. With --data.mixture every part's statistics are computed."""
    args = parse_args(argv)
    config, environment = args.config, Environment.from_env(env)
    if config.data.mixture is None:
        path = config.data.path or env.get("DATA_PATH") or None
        _compute(args, dataclasses.replace(config, data=dataclasses.replace(config.data, path=path)), environment)
    else:
        for part in read_mixture(config.data.mixture, config.data):
            _compute(args, dataclasses.replace(config, data=part.data), environment)
    return 0


def _compute(args: ComputeArgs, config: TrainConfig, environment: Environment) -> None:
    """Computes, writes and shows the statistics of one dataset."""
    console = rich.console.Console()
    start_s = time.monotonic()
    root = find_dataset(config.data.repo_id, config.data.path, environment, option="--data.path (or DATA_PATH)")
    dataset = open_dataset(root)
    columns = resolve_columns(config.data, dataset)
    rows = training_rows(dataset, config.data.episodes, config.data.keep_frames)
    rows = choose_frames(rows, args.max_frames)
    console.print(
        f"{root}: LeRobot {dataset.version}, {len(rows)} of {dataset.num_frames} frames, state {columns.state_key} "
        f"({columns.state_dim}), actions {columns.action_key} ({columns.action_dim}), "
        f"horizon {config.model.action_horizon}, delta dimensions {config.data.delta_action_dims}",
        highlight=False,
        soft_wrap=True,
    )
    with _progress(console, 2 + columns.state_dim + columns.action_dim) as on_done:
        stats = compute_norm_stats(
            dataset,
            columns,
            rows,
            config=config,
            min_state_range=args.min_state_range,
            min_action_range=args.min_action_range,
            on_done=on_done,
        )
    path = norm_stats_path(config.assets_base_dir, config.name, config.asset_id)
    save_norm_stats(path, stats)
    _print_table(console, stats)
    again = stats_command(config, str(root))
    for warning in narrow_range_warnings(stats, config.data.normalization, command=again):
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    console.print(f"{path} written in {time.monotonic() - start_s:.1f} s", highlight=False, soft_wrap=True)


def compute_norm_stats(
    dataset: LeRobotDataset,
    columns: NumericColumns,
    rows: np.ndarray,
    *,
    config: TrainConfig,
    min_state_range: float = 0.0,
    min_action_range: float = 0.0,
    on_done: Callable[[], None] = lambda: None,
) -> NormStats:
    """Exact statistics of the state over `rows` and of the action chunks that start there, after delta actions.

    Args:
        dataset: only its state and action columns are read.
        columns: which ones.
        rows: dataset rows.
        config: horizon, delta dimensions, number of threads, dataset name.
        min_state_range, min_action_range: floors under q99 - q01; 0 is none.
        on_done: called after each column read and each dimension.

    Raises:
        UserError: NaN or infinity; names episodes and frames.
    """
    state = numeric_column(dataset, columns.state_key)
    require_finite(dataset, columns.state_key, rows)
    on_done()
    actions = numeric_column(dataset, columns.action_key)
    reached = reached_rows(dataset.episode_starts, rows, config.model.action_horizon)
    require_finite(dataset, columns.action_key, reached)
    on_done()
    delta_dims = config.data.delta_action_dims
    if delta_dims > min(columns.state_dim, columns.action_dim):
        raise UserError(
            f"--data.delta-action-dims={delta_dims} is more than the state ({columns.state_dim}) or the actions "
            f"({columns.action_dim}) have."
        )
    of_state = state_statistics(state, rows, on_done=on_done)
    of_actions = action_statistics(
        actions,
        state,
        rows,
        dataset.episode_starts,
        horizon=config.model.action_horizon,
        delta_dims=delta_dims,
        num_threads=config.num_workers,
        on_done=on_done,
    )
    if min_state_range:
        of_state = with_min_range(of_state, min_state_range)
    if min_action_range:
        of_actions = with_min_range(of_actions, min_action_range)
    computed_for = ComputedFor(
        dataset=config.data.repo_id,
        fingerprint=fingerprint(state, actions),
        num_frames=len(rows),
        action_horizon=config.model.action_horizon,
        delta_action_dims=delta_dims,
        state_key=columns.state_key,
        action_key=columns.action_key,
        min_state_range=min_state_range,
        min_action_range=min_action_range,
    )
    return NormStats(state=of_state, actions=of_actions, computed_for=computed_for)


def choose_frames(rows: np.ndarray, max_frames: int | None) -> np.ndarray:
    """At most `max_frames` of the rows, ascending, the same ones every time."""
    if max_frames is None or max_frames >= len(rows):
        return rows
    return np.sort(np.random.default_rng(_SEED).choice(rows, max_frames, replace=False))


def _config_name(argv: Sequence[str]) -> str | None:
    for i, arg in enumerate(argv):
        name, equals, value = arg.partition("=")
        if name in ("--config-name", "--config_name"):
            return value if equals else next(iter(argv[i + 1 : i + 2]), None)
    return None


@contextlib.contextmanager
def _progress(console: rich.console.Console, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; elsewhere a plain line at every quarter."""
    if console.is_terminal:
        with rich.progress.Progress(console=console) as bar:
            task = bar.add_task("columns and dimensions", total=total)
            yield lambda: bar.advance(task)
        return
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if 4 * done // total > 4 * (done - 1) // total:
            console.print(f"{100 * done // total} % of columns and dimensions", highlight=False)

    yield count


def _print_table(console: rich.console.Console, stats: NormStats) -> None:
    table = rich.table.Table("", "dim", "mean", "std", "q01", "q99")
    for key, of_key in (("state", stats.state), ("actions", stats.actions)):
        assert of_key.q01 is not None and of_key.q99 is not None
        for dim, numbers in enumerate(zip(of_key.mean, of_key.std, of_key.q01, of_key.q99, strict=True)):
            table.add_row(key, str(dim), *(f"{number:.6g}" for number in numbers))
    console.print(table)
