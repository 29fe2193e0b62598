"""Dataset rows to training batches, on the host. B batch, A action horizon, L prompt tokens, E action dimension."""

import functools
from collections.abc import Callable

import numpy as np

from openpi_accel.config.schema import AUTO, CAMERA_SLOTS, IMAGE_SIZE, DataConfig, LossConfig, ModelConfig
from openpi_accel.data.lerobot.baseline import BaselineReader
from openpi_accel.data.lerobot.dataset import LeRobotDataset
from openpi_accel.data.mapping import DataMapping
from openpi_accel.data.norm_stats import NormStats
from openpi_accel.data.packed import PackedFrames
from openpi_accel.data.rows import numeric_column, reached_rows, require_finite
from openpi_accel.data.tokenizer import PromptTokenizer, round_up, scan_prompt_lengths
from openpi_accel.data.transforms import NumericTransform, to_model_image
from openpi_accel.errors import UserError
from openpi_accel.types import Batch, Observation


class BatchSource:
    """Makes batches of any rows. Holds no position: several threads may call it at once.

    Attributes:
        dataset, mapping, tokenizer: what it reads with.
        numbers: the transform of state and actions, also the way back.
        slots: the camera slots of its batches, in the model's order.
        horizon: A.
    """

    def __init__(
        self,
        *,
        dataset: LeRobotDataset,
        mapping: DataMapping,
        norm_stats: NormStats,
        tokenizer: PromptTokenizer,
        model: ModelConfig,
        data: DataConfig,
        skip_images: tuple[str, ...] = (),
        only_consumed: bool = False,
        packed: PackedFrames | None = None,
        baseline: BaselineReader | None = None,
        loss: LossConfig = LossConfig(),  # noqa: B008  # frozen
    ) -> None:
        """Checks that the parts fit; reads no frame.

        Args:
            dataset: the opened dataset.
            mapping: from `resolve_mapping`.
            norm_stats: of this robot.
            tokenizer: with its max_token_len settled (`settle_max_token_len`).
            model: horizon, padded dimension, whether the state is in the prompt.
            data: normalisation, delta actions, default prompt.
            skip_images: slots to leave out of the batches, or ("auto",) for every slot that no camera feeds.
            only_consumed: False decodes every camera of the dataset and throws away what the model does not take, as
                upstream does; True decodes the mapped cameras alone. The batches are equal.
            loss: what the loss leaves out; by default nothing, and batches have no action_mask.
            baseline: read rows through lerobot instead of `dataset`; the batches are equal.
            packed: take the frames from this cache of the dataset; nothing is decoded then, and the batches are equal.

        Raises:
            UserError: a skipped slot is fed by a camera; dimensions, statistics and model do not fit.
        """
        self.dataset, self.mapping, self.tokenizer = dataset, mapping, tokenizer
        self.horizon, self.state_in_prompt = model.action_horizon, model.discrete_state_input
        self.default_prompt = data.default_prompt
        self.numbers = NumericTransform(
            norm_stats=norm_stats,
            normalization=data.normalization,
            delta_action_dims=data.delta_action_dims,
            state_dim=mapping.state_dim,
            action_dim=mapping.action_dim,
            padded_dim=model.action_dim,
        )
        self.slots = _kept_slots(mapping, skip_images)
        fed = set(mapping.cameras.as_dict().values())
        self._packed, self._baseline, self._loss = packed, baseline, loss
        self._decoded = tuple(key for key in dataset.cameras if not only_consumed or key in fed)
        self._encoded_prompts: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def load_batch(self, rows: np.ndarray) -> Batch:
        """The batch of these dataset rows, numpy arrays on the host.

        Args:
            rows: B dataset rows, in any order.

        Returns:
            images B 224 224 3 uint8 per slot, masks B, state B E, prompt B L, actions B A E; action_mask where the loss
            leaves something out.

        Raises:
            UserError: NaN or infinity (names dataset, episode and frame), a prompt too long, a row without task text.
        """
        rows = np.asarray(rows)
        if self._baseline is not None:
            read = self._baseline.read(rows)
            state, actions, is_pad, tasks = read.state, read.actions, read.is_pad, read.tasks
            frames_of: Callable[[str], list[np.ndarray]] = read.frames.__getitem__
        else:
            state = numeric_column(self.dataset, self.mapping.state_key)[rows]
            actions, is_pad = self.dataset.chunk(self.mapping.action_key, rows, self.horizon)
            tasks, frames_of = self.dataset.task_of(rows), functools.partial(self.dataset.frames, rows=rows)
        if not (np.isfinite(state).all() and np.isfinite(actions).all()):
            require_finite(self.dataset, self.mapping.state_key, np.sort(rows))
            reached = reached_rows(self.dataset.episode_starts, rows, self.horizon)
            require_finite(self.dataset, self.mapping.action_key, reached)
        normalized_state = self.numbers.normalize_state(state)
        tokens, token_mask = self._prompts(with_default(tasks, self.default_prompt), normalized_state)
        images, image_masks = self._images(rows, frames_of)
        observation = Observation(
            images=images,  # type: ignore[arg-type]  # numpy on the host, jax on the device: one pytree for both
            image_masks=image_masks,  # type: ignore[arg-type]
            state=self.numbers.pad(normalized_state),  # type: ignore[arg-type]
            tokenized_prompt=tokens,  # type: ignore[arg-type]
            tokenized_prompt_mask=token_mask,  # type: ignore[arg-type]
        )
        padded_actions = self.numbers.pad(self.numbers.normalize_actions(actions, state))
        return Batch(
            observation=observation,
            actions=padded_actions,  # type: ignore[arg-type]
            action_mask=self._action_mask(is_pad, padded_actions.shape),  # type: ignore[arg-type]
        )

    def _action_mask(self, is_pad: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
        """B A E: which numbers of the action chunk count in the loss; None for all."""
        if self._loss == LossConfig():
            return None
        mask = np.ones(shape, bool)
        if self._loss.mask_padded_steps:
            mask &= ~is_pad[:, :, None]
        if self._loss.mask_padded_dims:
            mask[:, :, self.numbers.action_dim :] = False
        return mask

    def prompts(self, rows: np.ndarray) -> list[str]:
        """The task text of each row, or the default prompt where there is none.

        Raises:
            UserError: no text and no default.
        """
        return with_default(self.dataset.task_of(rows), self.default_prompt)

    def restore_actions(self, actions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The model's normalised actions, B A E, as absolute commands in the dataset's units, B A D float64."""
        return self.numbers.restore_actions(actions, numeric_column(self.dataset, self.mapping.state_key)[rows])

    def _prompts(self, texts: list[str], normalized_state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.state_in_prompt:
            encoded = [self.tokenizer.encode(text, one) for text, one in zip(texts, normalized_state, strict=True)]
        else:
            for text in set(texts) - self._encoded_prompts.keys():
                self._encoded_prompts[text] = self.tokenizer.encode(text)
            encoded = [self._encoded_prompts[text] for text in texts]
        return np.stack([tokens for tokens, _ in encoded]), np.stack([mask for _, mask in encoded])

    def _images(
        self, rows: np.ndarray, frames_of: Callable[[str], list[np.ndarray]]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        feeds = self.mapping.cameras.as_dict()
        square = (len(rows), IMAGE_SIZE, IMAGE_SIZE, 3)
        images = {s: np.empty(square, np.uint8) if s in feeds else np.zeros(square, np.uint8) for s in self.slots}
        masks = {slot: np.full(len(rows), slot in feeds) for slot in self.slots}
        if self._packed is not None:
            out = {key: images[slot] for slot, key in feeds.items()}
            self._packed.read(rows, out)
            for slot, key in feeds.items():  # one camera may feed two slots
                if images[slot] is not out[key]:
                    images[slot][:] = out[key]
            return images, masks
        for key in self._decoded:
            frames = frames_of(key)
            for slot in (s for s in self.slots if feeds.get(s) == key):
                for i, frame in enumerate(frames):
                    try:
                        images[slot][i] = to_model_image(frame)
                    except UserError as error:
                        raise self.dataset.frame_error(key, int(rows[i]), str(error)) from error
        return images, masks


def settle_max_token_len(
    dataset: LeRobotDataset, mapping: DataMapping, tokenizer: PromptTokenizer, model: ModelConfig, data: DataConfig
) -> int:
    """`model.max_token_len`, or for auto the longest prompt of the task table, rounded up to a multiple of 4.

    With the state in the prompt, auto leaves room for the costliest state (`scan_prompt_lengths`), so that a policy can
    be asked about any state later.
    """
    if isinstance(model.max_token_len, int):
        return model.max_token_len
    state_dim = mapping.state_dim if model.discrete_state_input else None
    # Tasks without text that no row uses do not matter here; rows without text are refused when they are read.
    texts = [text for task in dataset.tasks.values() if (text := task or data.default_prompt)]
    return round_up(scan_prompt_lengths(tokenizer, texts or [data.default_prompt or ""], state_dim).longest)


def with_default(tasks: list[str], default: str | None) -> list[str]:
    """Fills in the default prompt.

    Raises:
        UserError: a task without text and no default.
    """
    if all(task.strip() for task in tasks):
        return tasks
    if not default:
        missing = sum(not task.strip() for task in tasks)
        raise UserError(
            f"{missing} of {len(tasks)} frames have no task text, and the model needs a prompt. "
            'Give one with --data.default-prompt="what the robot does".'
        )
    return [task if task.strip() else default for task in tasks]


def _kept_slots(mapping: DataMapping, skip_images: tuple[str, ...]) -> tuple[str, ...]:
    feeds = mapping.cameras.as_dict()
    if skip_images == (AUTO,):
        return tuple(slot for slot in CAMERA_SLOTS if slot in feeds)
    for slot in skip_images:
        if slot in feeds:
            raise UserError(
                f"OPENPI_SKIP_IMAGES leaves out {slot}, but the dataset's camera {feeds[slot]!r} feeds it: the model "
                "would train without that camera. Take it out of OPENPI_SKIP_IMAGES, or unmap the camera."
            )
    return tuple(slot for slot in CAMERA_SLOTS if slot not in skip_images)
