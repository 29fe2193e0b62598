"""What is looked at before training starts, so that faults of the data show in seconds and not after hours."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from openpi_accel.data.norm_stats import (
    GAUSS_WIDTH,
    ComputedFor,
    Normalization,
    check_computed_for,
    narrow_range_warnings,
)
from openpi_accel.data.pipeline import BatchSource
from openpi_accel.data.rows import last_row_of_episode, name_rows, numeric_column, reached_rows, require_finite
from openpi_accel.data.statistics import fingerprint
from openpi_accel.data.tokenizer import count_too_long, round_up, scan_prompt_lengths, shorten
from openpi_accel.errors import UserError

_SAMPLE = 4096
_MAX_SHARE_OUTSIDE = 0.2
_MAX_SHARE_CLIPPED = 0.03  # 2 % by the quantiles, somewhat more in few frames
_MIN_SPREAD = 0.2  # normalised values should fill about 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataReport:
    """What the check found.

    Attributes:
        num_frames: frames that training draws from.
        num_prompts: distinct prompts.
        longest_prompt: tokens of the longest prompt (with the state in the prompt: at most).
        num_clipped_state_values: state values outside [-1, 1] after normalising, which the prompt's bins clip; 0 where
            the state is not in the prompt.
        warnings: one line each, for the user.
    """

    num_frames: int
    num_prompts: int
    longest_prompt: int
    num_clipped_state_values: int
    warnings: tuple[str, ...]


def validate_before_training(
    source: BatchSource, rows: np.ndarray, *, command: str, left_out: Sequence[str] = ()
) -> DataReport:
    """Reads every number and every prompt that training will use; no image.

    Args:
        source: the configured source.
        rows: dataset rows that training draws from (`rows_of_episodes`).
        left_out: what was skipped (`without_bad_rows`), to be reported with the warnings.
        command: what computes the statistics anew (`stats_command`), for messages.

    Raises:
        UserError: NaN or infinity, frames without a prompt, prompts too long, statistics made for delta actions used
            with absolute ones or the reverse.
    """
    dataset, mapping, numbers = source.dataset, source.mapping, source.numbers
    require_finite(dataset, mapping.state_key, rows)
    require_finite(dataset, mapping.action_key, reached_rows(dataset.episode_starts, rows, source.horizon))
    state, actions = numeric_column(dataset, mapping.state_key), numeric_column(dataset, mapping.action_key)

    expected = ComputedFor(
        dataset=str(dataset.root),
        fingerprint=fingerprint(state, actions),
        num_frames=len(rows),
        action_horizon=source.horizon,
        delta_action_dims=numbers.delta_action_dims,
        state_key=mapping.state_key,
        action_key=mapping.action_key,
    )
    warnings = check_computed_for(numbers.norm_stats, expected, command=command)
    warnings += narrow_range_warnings(numbers.norm_stats, numbers.normalization, command=command)
    warnings += _fit_warnings(source, rows)

    normalized_state = numbers.normalize_state(state[rows])
    prompts = source.prompts(rows)
    longest, too_long = _check_prompts(source, prompts, normalized_state)
    if too_long:
        warnings.append(too_long)
    clipped = int(np.count_nonzero(np.abs(normalized_state) > 1)) if source.state_in_prompt else 0
    if too_many := _clipping_warning(clipped, normalized_state.size, numbers.normalization, command):
        warnings.append(too_many)
    return DataReport(
        num_frames=len(rows),
        num_prompts=len(set(prompts)),
        longest_prompt=longest,
        num_clipped_state_values=clipped,
        warnings=(*left_out, *warnings),
    )


def without_bad_rows(source: BatchSource, rows: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Leaves out what `validate_before_training` would refuse: NaN or infinity in the state or in the actions that the
    row's chunk reaches, and rows without a prompt.

    Returns:
        The good rows, and one line for each reason.

    Raises:
        UserError: no row is left.
    """
    dataset, mapping = source.dataset, source.mapping
    state = numeric_column(dataset, mapping.state_key)
    actions = np.isfinite(numeric_column(dataset, mapping.action_key)).all(axis=1)
    ends = last_row_of_episode(dataset.episode_starts, rows) + 1
    bad_so_far = np.concatenate([[0], np.cumsum(~actions)])
    reached = bad_so_far[np.minimum(rows + source.horizon, ends)] - bad_so_far[rows]
    prompts = np.array([bool(task.strip() or source.default_prompt) for task in dataset.task_of(rows)], bool)
    good, lines = np.ones(len(rows), bool), []
    for what, fine in (
        (f"NaN or infinity in {mapping.state_key!r}", np.isfinite(state[rows]).all(axis=1)),
        (f"NaN or infinity in {mapping.action_key!r} within the chunk", reached == 0),
        ("no task text", prompts),
    ):
        if not fine.all():
            lines.append(f"{int((~fine).sum())} frames are left out, {what}: {name_rows(dataset, rows[~fine])}.")
        good &= fine
    if not good.any():
        raise UserError(f"{dataset.root}: every frame is bad; nothing is left to train on. {' '.join(lines)}")
    return rows[good], lines


def _check_prompts(source: BatchSource, prompts: list[str], states: np.ndarray) -> tuple[int, str | None]:
    """Length of the longest prompt, and a warning where prompts will be cut."""
    tokenizer, limit = source.tokenizer, source.tokenizer.max_token_len
    assert limit is not None, "BatchSource takes a tokenizer with a settled length"
    in_prompt = source.state_in_prompt
    scan = scan_prompt_lengths(tokenizer, prompts, states.shape[1] if in_prompt else None)
    suspects = set(scan.too_long(limit))
    if not suspects:
        return scan.longest, None
    frames = [i for i, prompt in enumerate(prompts) if prompt in suspects]
    # The bound over all states was passed; what counts are the states that occur.
    count = count_too_long(tokenizer, [prompts[i] for i in frames], states[frames], limit) if in_prompt else len(frames)
    if count == 0:
        return scan.longest, None
    what = (
        f"{count} of {len(prompts)} frames have a prompt longer than --model.max-token-len={limit} "
        f"({len(suspects)} of {len(scan.lengths)} tasks; the longest takes {scan.longest} tokens: "
        f"{shorten(scan.longest_prompt)})"
    )
    if not tokenizer.allow_truncation:
        raise UserError(
            f"{what}. Set --model.max-token-len={round_up(scan.longest)} or auto, shorten the task, or cut prompts "
            "with --data.allow-truncation (the end is lost: with the state in the prompt, the state)."
        )
    return scan.longest, f"{what}. They are cut, as --data.allow-truncation says."


def _clipping_warning(clipped: int, size: int, how: Normalization, command: str) -> str | None:
    """Where more of the state is clipped than the normalisation explains."""
    share = clipped / size
    if share <= _MAX_SHARE_CLIPPED:
        return None
    seen = (
        f"{100 * share:.1f} % of the state values ({clipped} of {size}) lie outside [-1, 1] after normalising, and the "
        "prompt's bins clip them"
    )
    if how == "zscore":
        return f"{seen}. With --data.normalization=zscore that is a third of normal data; quantile leaves out 2 %."
    return f"{seen}. The 1 % and 99 % quantiles leave out 2 %, so the statistics are of other data. Anew: {command}"


def _fit_warnings(source: BatchSource, rows: np.ndarray) -> list[str]:
    """Do the statistics look like this data's? Finds swapped files (another robot, absolute against delta)."""
    numbers = source.numbers
    sample = rows[:: max(1, len(rows) // _SAMPLE)]
    state = numeric_column(source.dataset, source.mapping.state_key)[sample]
    actions, _ = source.dataset.chunk(source.mapping.action_key, sample, source.horizon)
    values = {
        "state": numbers.normalize_state(state),
        "actions": numbers.normalize_actions(actions, state).reshape(-1, numbers.action_dim),
    }
    swapped = f", or to {'absolute' if numbers.delta_action_dims else 'delta'} actions"
    return [
        f"{key} dimension {dim}: {fault}. The normalisation statistics may belong to other data"
        f"{swapped if key == 'actions' else ''}."
        for key, array in values.items()
        for dim in range(array.shape[1])
        if (fault := _misfit(array[:, dim], numbers.normalization))
    ]


def _misfit(values: np.ndarray, how: Normalization) -> str | None:
    limit, scale = (1.0, 1.0) if how == "quantile" else (GAUSS_WIDTH / 2, 2 / GAUSS_WIDTH)
    # A hair beyond the limit is rounding: a gripper that is always -1 or 1 sits on its quantiles.
    outside = float(np.mean(np.abs(values) > limit * 1.01 + 1e-3))
    if outside > _MAX_SHARE_OUTSIDE:
        return f"{100 * outside:.0f} % of the values lie outside the range of the statistics"
    low, high = np.quantile(values * scale, (0.01, 0.99))
    if 0 < high - low < _MIN_SPREAD:
        return f"the values fill only {100 * (high - low) / 2:.1f} % of the range of the statistics"
    return None
