"""Tries a trained policy on recorded episodes: samples action chunks and compares them with what was done there."""

import argparse
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from openpi_accel.build.files import FileOptions
from openpi_accel.config.environment import Environment
from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import TrainConfig
from openpi_accel.data.lerobot.dataset import LeRobotDataset
from openpi_accel.data.mixture_file import part_named, read_mixture
from openpi_accel.data.pipeline import BatchSource
from openpi_accel.data.rows import hold_out, numeric_column, rows_of_episodes
from openpi_accel.data.statistics import fingerprint
from openpi_accel.data.transforms import to_absolute
from openpi_accel.errors import UserError
from openpi_accel.tools.open_loop import OpenLoopErrors, last_action, open_loop_errors, spread_rows
from openpi_accel.tools.open_loop_plot import plot_episode
from openpi_accel.tools.policy import Checkpoint, Policy, find_checkpoint, load_policy

_MAX_PLOTS = 3
_RELATIVE_ROW = "over mean action's"
_LEGEND = (
    f"{_RELATIVE_ROW}: the error divided by that of always answering the data's mean action, averaged over the "
    "dimensions; below 1 is better than knowing nothing. last action: repeating what was done one frame before.\n"
    "loss: the training loss (flow matching, normalised actions, without augmentation) per dimension, and their mean."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured.

    Attributes:
        episodes: the episodes that the frames are from.
        held_out: True: none of them was trained on; False: some were; None: the checkpoint does not say.
        errors: of the policy, the mean action and the repeated last action.
        dim_names: names of the action dimensions.
        loss: flow-matching loss per real action dimension.
    """

    episodes: tuple[int, ...]
    held_out: bool | None
    errors: OpenLoopErrors
    dim_names: tuple[str, ...]
    loss: np.ndarray

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "episodes": list(self.episodes),
            "held_out": self.held_out,
            "action_names": list(self.dim_names),
            "loss_real_dims": self.loss.tolist(),
            **self.errors.as_json(),
        }


def evaluate(
    policy: Policy,
    rows: np.ndarray,
    *,
    trained_on: Sequence[int] | None,
    num_steps: int = 10,
    seed: int = 0,
    loss_draws: int = 1,
) -> Evaluation:
    """Samples a chunk for each of the dataset rows.

    Args:
        policy: the model and its data.
        rows: N dataset rows.
        trained_on: episodes of the training run; None if that is not known.
        num_steps: Euler steps of the sampler.
        seed: of the sampler's noise.
        loss_draws: pairs of noise and time per frame for the loss.
    """
    source, dataset = policy.source, policy.source.dataset
    key, dims = source.mapping.action_key, source.mapping.action_dim
    recorded, is_pad = dataset.chunk(key, rows, source.horizon)
    recorded = np.asarray(recorded, np.float64).reshape(*is_pad.shape, dims)
    mean = np.broadcast_to(source.numbers.norm_stats.actions.mean[:dims], recorded.shape)
    state = numeric_column(dataset, source.mapping.state_key)[rows]
    mean = to_absolute(mean, state, source.numbers.delta_action_dims)
    last = last_action(dataset, key, rows, at_start=mean[:, 0])
    predictions = {
        "policy": policy.predict(rows, seed=seed, num_steps=num_steps),
        "mean action": mean,
        "last action": np.broadcast_to(last[:, None], recorded.shape),
    }
    episodes = tuple(int(e) for e in np.unique(dataset.episode_ids[dataset.episode_of(rows)]))
    return Evaluation(
        episodes=episodes,
        held_out=None if trained_on is None else not set(episodes) & set(trained_on),
        errors=open_loop_errors(recorded, is_pad, predictions),
        dim_names=action_names(dataset, key, dims),
        loss=policy.loss(rows, seed=seed, draws=loss_draws).mean(0),
    )


def action_names(dataset: LeRobotDataset, key: str, dims: int) -> tuple[str, ...]:
    """The dataset's names of the action dimensions, or their numbers where it names none."""
    names = dataset.features[key].names
    return names if names is not None and len(names) == dims else tuple(f"action {i}" for i in range(dims))


def choose_episodes(
    dataset: LeRobotDataset, trained_on: Sequence[int] | None, asked: Sequence[int] | None
) -> list[int]:
    """The episodes asked for; else those held out of training; else, where nothing was held out, all."""
    if asked:
        return list(asked)
    all_episodes = [int(number) for number in dataset.episode_ids]
    return [number for number in all_episodes if number not in set(trained_on or ())] or all_episodes


def save_plots(
    policy: Policy, evaluation: Evaluation, out: pathlib.Path, *, num_steps: int, seed: int
) -> list[pathlib.Path]:
    """Pictures of the longest episodes: recorded actions, and predicted chunks one after the other."""
    dataset, paths = policy.source.dataset, []
    rows_of = {episode: rows_of_episodes(dataset, [episode]) for episode in evaluation.episodes}
    longest = sorted(rows_of, key=lambda episode: -len(rows_of[episode]))
    for episode in sorted(longest[:_MAX_PLOTS]):
        rows = rows_of[episode]
        starts = rows[:: policy.source.horizon]
        recorded = numeric_column(dataset, policy.source.mapping.action_key)[rows]
        predicted = policy.predict(starts, seed=seed, num_steps=num_steps)
        path = out / f"episode_{episode}.png"
        title = f"episode {episode}: {policy.source.prompts(rows[:1])[0]}"
        plot_episode(path, recorded, predicted, starts - rows[0], evaluation.dim_names, title)
        paths.append(path)
    return paths


def print_tables(console: Console, evaluation: Evaluation) -> None:
    """Errors per dimension and per step of the chunk."""
    errors = evaluation.errors
    table = Table(title="mean absolute error per action dimension, in the dataset's units")
    for heading in ("dimension", *errors.per_dim, "loss"):
        table.add_column(heading, justify="left" if heading == "dimension" else "right")
    for i, name in enumerate(evaluation.dim_names):
        values = [f"{errors.per_dim[method][i]:.4g}" for method in errors.per_dim]
        table.add_row(name, *values, f"{evaluation.loss[i]:.4g}")
    relative = [f"{errors.relative(method):.3f}" for method in errors.per_dim]
    table.add_row(_RELATIVE_ROW, *relative, f"{evaluation.loss.mean():.4g}", style="bold")
    console.print(table)
    table = Table(title="error per step of the chunk, over the mean action's error")
    for heading in ("step", *errors.per_step):
        table.add_column(heading, justify="right")
    per_step = {method: errors.relative_per_step(method) for method in errors.per_step}
    for step in range(len(next(iter(per_step.values())))):
        table.add_row(str(step), *(f"{per_step[method][step]:.3f}" for method in per_step))
    console.print(table)
    console.print(_LEGEND, highlight=False, soft_wrap=True)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """The script."""
    args = _parse(argv)
    console = Console(stderr=args.json)
    checkpoint = find_checkpoint(args.checkpoint)
    checkpoint = _of_part(checkpoint, args.part)
    config = _config(args, checkpoint, env)
    policy = load_policy(
        checkpoint,
        config,
        Environment.from_env(env),
        batch_size=args.batch_size,
        asset_id=args.asset_id,
        options=FileOptions(dataset="--data (or DATA_PATH)", tokenizer="--tokenizer"),
    )
    dataset = policy.source.dataset
    trained = trained_on(checkpoint, policy.source)
    rows = rows_of_episodes(dataset, choose_episodes(dataset, trained, args.episodes))
    evaluation = evaluate(
        policy, spread_rows(rows, args.num_samples), trained_on=trained, num_steps=args.num_steps, seed=args.seed
    )
    out = pathlib.Path(args.out) if args.out else checkpoint.folder.parent / f"open_loop_{checkpoint.folder.name}"
    pictures = save_results(policy, evaluation, out, num_steps=args.num_steps, seed=args.seed)
    kind = {True: "held out of training", False: "trained on, at least in part", None: "training episodes unknown"}
    console.print(
        f"{checkpoint.folder}: {evaluation.errors.num_frames} frames of {len(evaluation.episodes)} episodes of "
        f"{dataset.root} ({kind[evaluation.held_out]})",
        highlight=False,
        soft_wrap=True,
    )
    print_tables(console, evaluation)
    console.print("\n".join(f"plot: {path}" for path in pictures), highlight=False, soft_wrap=True)
    if args.json:
        print(json.dumps({"checkpoint": str(checkpoint.folder), "data": str(dataset.root), **evaluation.as_json()}))
    return 0


def save_results(
    policy: Policy, evaluation: Evaluation, out: pathlib.Path, *, num_steps: int, seed: int
) -> list[pathlib.Path]:
    """Writes errors.json and the plots; returns the plots."""
    out.mkdir(parents=True, exist_ok=True)
    pictures = save_plots(policy, evaluation, out, num_steps=num_steps, seed=seed)
    aside = out / ".errors.json.tmp"
    aside.write_text(json.dumps(evaluation.as_json(), indent=2) + "\n")
    os.replace(aside, out / "errors.json")
    return pictures


def trained_on(checkpoint: Checkpoint, source: BatchSource) -> tuple[int, ...] | None:
    """Episodes of the source's dataset that the run trained on.

    None where nothing says so: a run without config.json, or a dataset that is neither at the run's path nor equal in
    every state and action to what the run's statistics were computed from.
    """
    if checkpoint.config is None:
        return None
    dataset, data = source.dataset, checkpoint.config.data
    columns = (numeric_column(dataset, key) for key in (source.mapping.state_key, source.mapping.action_key))
    computed_for = source.numbers.norm_stats.computed_for
    same_place = data.path is not None and pathlib.Path(data.path).expanduser().resolve() == dataset.root.resolve()
    if not same_place and (computed_for is None or computed_for.fingerprint != fingerprint(*columns)):
        return None
    rows = rows_of_episodes(dataset, data.episodes)
    rows, _ = hold_out(dataset, rows, data.val_fraction, checkpoint.config.seed)
    return tuple(int(number) for number in dataset.episode_ids[np.unique(dataset.episode_of(rows))])


def _of_part(checkpoint: Checkpoint, name: str | None) -> Checkpoint:
    """A checkpoint of a mixture as if it had been trained on the named part alone; another one as it is."""
    config = checkpoint.config
    if config is None or config.data.mixture is None:
        return checkpoint
    part = part_named(read_mixture(config.data.mixture, config.data), name, "--part")
    return dataclasses.replace(checkpoint, config=dataclasses.replace(config, data=part.data))


def _config(args: argparse.Namespace, checkpoint: Checkpoint, env: Mapping[str, str]) -> TrainConfig:
    """The run's own config, or the named one; --data and --tokenizer over it."""
    config = get_preset(args.config) if args.config else checkpoint.config
    if config is None:
        raise UserError(
            f"{checkpoint.folder.parent} has no config.json that says what was trained. Name the config: --config=NAME."
        )
    data = dataclasses.replace(
        config.data,
        path=args.data or env.get("DATA_PATH") or config.data.path,
        tokenizer_path=args.tokenizer or config.data.tokenizer_path,
    )
    return dataclasses.replace(config, data=data)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="eval_open_loop.py", description=__doc__)
    parser.add_argument("checkpoint", help="run folder (its newest checkpoint is taken) or the folder of one step")
    parser.add_argument("--data", help="LeRobot dataset folder; default: DATA_PATH, else the one that was trained on")
    parser.add_argument("--part", help="which dataset of a mixture (--data.mixture) to try it on, by its name")
    parser.add_argument("--config", help="config name, where the run folder holds no config.json")
    parser.add_argument("--tokenizer", help="SentencePiece model file; default: the run's own")
    parser.add_argument("--asset-id", help="folder of the norm statistics in the checkpoint; default: the run's own")
    parser.add_argument("--episodes", type=int, nargs="+", help="default: those held out of training, else all")
    parser.add_argument("--num-samples", type=int, default=256, help="frames, evenly spaced over the episodes (256)")
    parser.add_argument("--num-steps", type=int, default=10, help="Euler steps of the sampler (10)")
    parser.add_argument("--batch-size", type=int, default=16, help="frames at once (16)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampler's noise (0)")
    parser.add_argument("--out", help="folder for plots and errors.json; default: open_loop_<step> in the run folder")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the tables on stderr")
    args = parser.parse_args(argv)
    for name in ("num_samples", "num_steps", "batch_size"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1.")
    return args
