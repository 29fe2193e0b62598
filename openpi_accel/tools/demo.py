"""The demo: writes a dataset, trains the small model on it by the code of every training, and shows that it learned."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console

from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.resumed import resume_command
from openpi_accel.config.schema import TrainConfig
from openpi_accel.data.lerobot.dataset import LeRobotDataset, open_dataset
from openpi_accel.data.mapping import resolve_columns
from openpi_accel.data.norm_stats import norm_stats_path, save_norm_stats
from openpi_accel.data.rows import rows_of_episodes
from openpi_accel.data.synthetic import SyntheticConfig, write_dataset
from openpi_accel.errors import UserError
from openpi_accel.tools.compute_norm_stats import compute_norm_stats
from openpi_accel.tools.eval_open_loop import Evaluation, evaluate, print_tables, save_results
from openpi_accel.tools.open_loop import spread_rows
from openpi_accel.tools.policy import Policy, find_checkpoint, load_policy
from openpi_accel.train.run_folder import committed_steps
from openpi_accel.training_run import run_folder_of, train

CONFIG_NAME = "pi05_demo"
CONTROL, ONLY_TRAIN = "--with-control", "--only-train"
TOKENIZER = pathlib.Path(__file__).resolve().parents[2] / "assets" / "demo" / "tokenizer.model"
# The control's loss must exceed the policy's by this factor for "clearly below".
CLEARLY = 1.15
_HELD_OUT_SHARE = 8  # one in so many episodes
_NUM_FRAMES = 96  # held-out frames that are tried
_LOSS_DRAWS = 4
_BATCH_SIZE = 16


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """`pi05_demo --exp-name=NAME [options of scripts/train.py] [--with-control | --only-train]`.

    Returns:
        0; 1 where the policy does not beat the mean action, or not the control; the run's own code if it was stopped.
    """
    console = Console(highlight=False, soft_wrap=True)
    start_s = time.monotonic()
    with_control = CONTROL in argv
    config = parse_train_config(
        [arg for arg in argv if arg not in (CONTROL, ONLY_TRAIN)],
        prog="python scripts/demo.py",
        description=f"Writes a dataset, trains on it, evaluates. {CONTROL} trains a second model on shuffled pictures "
        f"and prompts, to compare; {ONLY_TRAIN} leaves the evaluation out.",
    )
    if config.name != CONFIG_NAME:
        raise UserError(f"scripts/demo.py runs {CONFIG_NAME} alone. Train {config.name} with scripts/train.py.")
    acceleration, environment = Acceleration.from_env(env), Environment.from_env(env)

    config, held_out = prepare(config, console)
    folder = run_folder_of(config)
    result = train(config, acceleration, environment)
    finished = result.state is None
    if result.exit_code:
        console.print(f"stopped by a signal; go on with: {resume_command(config, 'scripts/demo.py')}")
        return result.exit_code
    if ONLY_TRAIN in argv:
        return 0
    if finished:
        more = 2 * config.num_train_steps
        console.print(
            f"The run is only evaluated again. Train on with: RESUME=1 EXP_NAME={config.exp_name} bash run_opt.sh "
            f"{CONFIG_NAME} --num-train-steps {more}"
        )
    policy, evaluation = try_policy(config, config, held_out, environment)
    out = folder / "open_loop"
    pictures = save_results(policy, evaluation, out, num_steps=10, seed=0)

    console.print(f"\n{len(held_out)} frames of {len(evaluation.episodes)} episodes that training never saw:")
    print_tables(console, evaluation)
    failures = verdict(evaluation, console)
    if with_control:
        failures += try_control(config, evaluation, held_out, acceleration, environment, console)
    checkpoint = folder / str(committed_steps(folder)[-1])
    for what, path in {
        "dataset": config.data.path,
        "checkpoint": checkpoint,
        "loss curve": folder / "loss_curve.png",
        "first batch": folder / "first_batch.png",
        "predicted and recorded actions": pictures[0],
        "numbers": f"{folder / 'metrics.jsonl'}, {out / 'errors.json'}",
    }.items():
        console.print(f"{what + ':':<32}{path}")
    console.print(f"{'evaluated' if finished else 'done'} in {time.monotonic() - start_s:.0f} s")
    for failure in failures:
        console.print(f"FAILED: {failure}", style="red")
    return 1 if failures else 0


def prepare(config: TrainConfig, console: Console) -> tuple[TrainConfig, np.ndarray]:
    """Writes dataset and statistics where they are missing.

    Returns:
        The config with everything found, and the held-out rows that the policy is to be tried on.
    """
    root = pathlib.Path(config.data.path or pathlib.Path(config.checkpoint_base_dir).expanduser() / "demo_data")
    config = _with_data(config, root, SyntheticConfig(), console)
    assert config.data.episodes is not None
    dataset = open_dataset(root)
    rest = sorted({int(number) for number in dataset.episode_ids} - set(config.data.episodes))
    if not rest:
        raise UserError("--data.episodes names every episode, so none is left to try the policy on. Leave some out.")
    return config, spread_rows(rows_of_episodes(dataset, rest), _NUM_FRAMES)


def training_episodes(dataset: LeRobotDataset) -> tuple[int, ...]:
    """All but the last eighth of the episodes."""
    ids = [int(number) for number in dataset.episode_ids]
    return tuple(ids[: len(ids) - max(1, len(ids) // _HELD_OUT_SHARE)])


def try_policy(
    trained: TrainConfig, tried_on: TrainConfig, rows: np.ndarray, environment: Environment
) -> tuple[Policy, Evaluation]:
    """The newest checkpoint of a run, on rows of the dataset of `tried_on`."""
    checkpoint = find_checkpoint(run_folder_of(trained))
    assert checkpoint.config is not None
    config = dataclasses.replace(
        checkpoint.config, data=dataclasses.replace(checkpoint.config.data, path=tried_on.data.path)
    )
    policy = load_policy(checkpoint, config, environment, batch_size=_BATCH_SIZE)
    return policy, evaluate(policy, rows, trained_on=trained.data.episodes, loss_draws=_LOSS_DRAWS)


def verdict(evaluation: Evaluation, console: Console) -> list[str]:
    """Says whether the policy beats the mean action; returns what failed."""
    relative = evaluation.errors.relative()
    console.print(f"error of the sampled actions: {relative:.3f} of the mean action's")
    if relative < 1:
        return []
    return [f"the sampled actions are no better than the mean action ({relative:.3f} of its error)"]


def try_control(
    config: TrainConfig,
    evaluation: Evaluation,
    rows: np.ndarray,
    acceleration: Acceleration,
    environment: Environment,
    console: Console,
) -> list[str]:
    """Trains the same model on shuffled pictures and prompts, and compares the losses; returns what failed."""
    assert config.data.path is not None
    root = pathlib.Path(config.data.path)
    control = dataclasses.replace(config, exp_name=f"{config.exp_name}_control", resume=False, overwrite=True)
    console.print("\ncontrol: the same model, steps and seed; pictures and prompts dealt out to other frames")
    shuffled = SyntheticConfig(shuffled=True)
    control = _with_data(control, root.with_name(f"{root.name}_shuffled"), shuffled, console, stats=False)
    result = train(control, acceleration, environment)
    if result.exit_code:
        return [f"the control run was stopped ({result.exit_code})"]
    _, of_control = try_policy(control, config, rows, environment)
    ours, theirs = float(evaluation.loss.mean()), float(of_control.loss.mean())
    console.print(
        f"loss over the {evaluation.loss.size} real action dimensions, held-out episodes: {ours:.4f}; "
        f"control {theirs:.4f} ({theirs / ours:.2f} times as much)"
    )
    numbers = {
        "loss_real_dims": ours,
        "control_loss_real_dims": theirs,
        "relative_to_mean_action": evaluation.errors.relative(),
    }
    (run_folder_of(config) / "open_loop" / "control.json").write_text(json.dumps(numbers) + "\n")
    if theirs > CLEARLY * ours:
        return []
    return [f"the loss ({ours:.4f}) is not clearly below the control's ({theirs:.4f}): less than {CLEARLY} times"]


def _with_data(
    config: TrainConfig, root: pathlib.Path, synthetic: SyntheticConfig, console: Console, *, stats: bool = True
) -> TrainConfig:
    """Dataset written, statistics computed, the last episodes held out, the demo's tokenizer named."""
    start_s = time.monotonic()
    if root.is_dir():
        console.print(f"dataset: {root} is there already")
    else:
        write_dataset(root, synthetic)
        console.print(f"dataset: wrote {root} in {time.monotonic() - start_s:.1f} s")
    dataset = open_dataset(root)
    episodes = config.data.episodes or training_episodes(dataset)
    tokenizer = config.data.tokenizer_path or str(TOKENIZER)
    packed = config.data.packed if root == pathlib.Path(config.data.path or root) else None
    data = dataclasses.replace(config.data, path=str(root), episodes=episodes, tokenizer_path=tokenizer, packed=packed)
    config = dataclasses.replace(config, data=data)
    if stats:
        path = norm_stats_path(config.assets_base_dir, config.name, config.asset_id)
        columns, rows = resolve_columns(config.data, dataset), rows_of_episodes(dataset, episodes)
        before = path.read_bytes() if path.is_file() else None
        save_norm_stats(path, compute_norm_stats(dataset, columns, rows, config=config))
        same = path.read_bytes() == before
        console.print(f"statistics: {path} is there already" if same else f"statistics: wrote {path}")
    return config
