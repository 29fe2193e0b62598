"""Host transforms between a dataset's rows and the model's inputs, and the way back.

Letters: B batch, A action horizon, D unpadded dimensions of state or actions, E the model's action dimension (32).
Order, as upstream: key mapping (mapping.py), uint8 images, delta actions, normalising (norm_stats.py), resizing
(resize.py), tokenising (tokenizer.py), padding.
"""

import dataclasses

import numpy as np

from openpi_accel.data.norm_stats import Normalization, NormStats, normalize, unnormalize
from openpi_accel.data.resize import resize_with_pad
from openpi_accel.errors import UserError


def to_uint8_hwc(image: np.ndarray) -> np.ndarray:
    """H W 3 uint8 from float C H W in [0, 1] (255 * x, truncated as upstream does) or from uint8 H W C or C H W.

    Raises:
        UserError: not three colour channels.
    """
    if np.issubdtype(image.dtype, np.floating):
        image = (255 * image).astype(np.uint8)
    if image.ndim == 3 and image.shape[0] == 3 and image.shape[-1] != 3:
        image = np.moveaxis(image, 0, -1)
    if image.ndim != 3 or image.shape[-1] != 3 or image.dtype != np.uint8:
        raise UserError(
            f"A camera image has shape {image.shape} and dtype {image.dtype}; the model takes colour images of three "
            "channels. Map another camera with --data.cameras."
        )
    return image


def to_model_image(image: np.ndarray) -> np.ndarray:
    """A camera's frame as the model takes it: 224 224 3 uint8. Raises as `to_uint8_hwc`."""
    return resize_with_pad(to_uint8_hwc(image))


def to_delta(actions: np.ndarray, state: np.ndarray, dims: int) -> np.ndarray:
    """The first `dims` action dimensions minus those of the state at the chunk's start, in the data's own dtype.

    Args:
        actions: B A D, absolute.
        state: B D', unnormalised.
        dims: 0 leaves the actions as they are.
    """
    return _shift(actions, -state[..., :dims], dims)


def to_absolute(actions: np.ndarray, state: np.ndarray, dims: int) -> np.ndarray:
    """Inverse of `to_delta`."""
    return _shift(actions, state[..., :dims], dims)


def pad_last_axis(x: np.ndarray, width: int) -> np.ndarray:
    """Zeros behind the last axis up to `width`; float32."""
    padded = np.zeros((*x.shape[:-1], width), np.float32)
    padded[..., : x.shape[-1]] = x
    return padded


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericTransform:
    """State and actions to the model's scale and back.

    Attributes:
        norm_stats: taken after delta actions.
        normalization: quantile or zscore.
        delta_action_dims: leading action dimensions relative to the state.
        state_dim, action_dim: D of each.
        padded_dim: E.
    """

    norm_stats: NormStats
    normalization: Normalization
    delta_action_dims: int
    state_dim: int
    action_dim: int
    padded_dim: int

    def __post_init__(self) -> None:
        """Raises UserError where data, statistics and model do not fit together."""
        for what, dim in (("state", self.state_dim), ("actions", self.action_dim)):
            if dim > self.padded_dim:
                raise UserError(
                    f"The dataset's {what} have {dim} dimensions, the model takes {self.padded_dim} "
                    "(--model.action-dim, fixed by the base weights). Choose a column with fewer: "
                    "--data.state-key, --data.action-key."
                )
            if dim < self.delta_action_dims:
                raise UserError(
                    f"--data.delta-action-dims={self.delta_action_dims} subtracts the state from the actions, but the "
                    f"dataset's {what} have only {dim} dimensions."
                )
        # Applying them once finds statistics that are too short or without quantiles.
        normalize(np.zeros(self.state_dim), self.norm_stats.state, self.normalization)
        normalize(np.zeros(self.action_dim), self.norm_stats.actions, self.normalization)

    def normalize_state(self, state: np.ndarray) -> np.ndarray:
        """... D -> ... D float64, unpadded: what the prompt's bins are made of."""
        return normalize(state, self.norm_stats.state, self.normalization)

    def normalize_actions(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """B A D absolute actions and B D' unnormalised state -> B A D float64."""
        deltas = to_delta(actions, state, self.delta_action_dims)
        return normalize(deltas, self.norm_stats.actions, self.normalization)

    def pad(self, x: np.ndarray) -> np.ndarray:
        """... D -> ... E float32."""
        return pad_last_axis(x, self.padded_dim)

    def restore_actions(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """What the model gives, as commands for the robot.

        Args:
            actions: B A E, normalised.
            state: B D', unnormalised.

        Returns:
            B A D float64, absolute, in the dataset's units.
        """
        actions = unnormalize(actions[..., : self.action_dim], self.norm_stats.actions, self.normalization)
        return to_absolute(actions, state, self.delta_action_dims)


def _shift(actions: np.ndarray, by: np.ndarray, dims: int) -> np.ndarray:
    if dims == 0:
        return actions
    shifted = actions.copy()
    shifted[..., :dims] += by[..., None, :]
    return shifted
