"""A drawn table-top task whose right action can be told only from the pictures and the prompt.

Two blocks of different colours lie at random places on a table; the prompt names one, and a gripper that starts at
random moves to it and closes. The robot state is the gripper's own position, which says nothing about where a block
lies or which one is meant. A base camera sways above the table; a wrist camera travels with the gripper.

Shape letters: T frames of an episode, S image side in pixels. World coordinates: metres, x to the right, y up, the
table's centre at the origin.
"""

import dataclasses
import functools

import numpy as np

COLOURS = {"red": (205, 30, 35), "green": (25, 165, 50), "blue": (30, 70, 215)}
TASKS = tuple(f"move to the {colour} block" for colour in COLOURS)
STATE_NAMES = ("x", "y")
ACTION_NAMES = ("vx", "vy", "gripper")
FPS = 10

_TABLE_HALF_M = 0.30
_BLOCK_HALF_M = 0.06
_BLOCK_AREA_M = 0.22  # blocks lie within this distance of the centre, per axis
_START_AREA_M = 0.12
_BLOCK_GAP_M = 0.17  # least distance between the centres of two blocks
_GRASP_RADIUS_M = 0.035
_GAIN_PER_S = 3.0  # near the block the gripper slows down
_MAX_SPEED_M_S = 0.2
_TREMBLE_M_S = 0.04
_HOLD_FRAMES = 4  # an episode ends when the gripper has been closed for so long
_MAX_FRAMES = 40
_BASE_VIEW_HALF_M = 0.36
_WRIST_VIEW_HALF_M = 0.40
_SWAY_M = 0.02

_TABLE_COLOUR = (214, 196, 168)
_GRAIN_COLOUR = (204, 185, 156)
_SHADOW_COLOUR = (118, 108, 92)
_FLOOR_COLOUR = (96, 98, 104)
_GRIPPER_COLOUR = (40, 40, 44)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """One demonstration.

    Attributes:
        task_index: T int64, which of TASKS is the prompt.
        state: T 2 float32, gripper position in metres.
        action: T 3 float32, velocity towards the named block in m/s, and the gripper command (0 open, 1 closed).
        base: T S S 3 uint8, the camera above the table.
        wrist: T S S 3 uint8, the camera on the gripper.
    """

    task_index: np.ndarray
    state: np.ndarray
    action: np.ndarray
    base: np.ndarray
    wrist: np.ndarray


def make_episode(rng: np.random.Generator, *, target: int, other: int, image_size: int) -> Episode:
    """Plays and draws one demonstration of TASKS[target]; equal generators give equal episodes.

    The scene does not depend on which of the two blocks is the target: equal generators lay the same two colours out in
    the same way.

    The hand trembles: what moves the gripper is the recorded command plus a disturbance, so that demonstrations leave
    the straight line and show how to come back to it (Laskey et al. 2017, DART).
    """
    blocks = dict(zip(sorted((target, other)), _place_blocks(rng), strict=True))
    position = rng.uniform(-_START_AREA_M, _START_AREA_M, size=2)
    tremble = np.zeros(2)
    sway_phase = rng.uniform(0, 2 * np.pi)
    closed = 0.0
    state: list[np.ndarray] = []
    action: list[list[float]] = []
    base: list[np.ndarray] = []
    wrist: list[np.ndarray] = []
    num_closed = 0
    while num_closed < _HOLD_FRAMES and len(state) < _MAX_FRAMES:
        time_s = len(state) / FPS
        to_target = blocks[target] - position
        distance = float(np.hypot(*to_target))
        velocity = to_target * min(_GAIN_PER_S, _MAX_SPEED_M_S / max(distance, 1e-9))
        command = max(closed, float(distance < _GRASP_RADIUS_M))
        sway = _SWAY_M * np.array([np.sin(2.5 * time_s + sway_phase), np.cos(1.7 * time_s + sway_phase)])
        draw = functools.partial(_draw, blocks=blocks, gripper=position, closed=closed, size=image_size)
        state.append(position)
        action.append([*velocity.tolist(), command])
        base.append(draw(view_centre=sway, view_half_m=_BASE_VIEW_HALF_M))
        wrist.append(draw(view_centre=position, view_half_m=_WRIST_VIEW_HALF_M))
        tremble = 0.7 * tremble + _TREMBLE_M_S * rng.standard_normal(2)
        position = np.clip(position + (velocity + tremble) / FPS, -_TABLE_HALF_M, _TABLE_HALF_M)
        closed = command
        num_closed += int(closed)
    return Episode(
        task_index=np.full(len(state), target),
        state=np.asarray(state, np.float32),
        action=np.asarray(action, np.float32),
        base=np.stack(base),
        wrist=np.stack(wrist),
    )


def _place_blocks(rng: np.random.Generator) -> np.ndarray:
    """(2, 2): the centres of two blocks, not closer than _BLOCK_GAP_M."""
    while True:
        blocks = rng.uniform(-_BLOCK_AREA_M, _BLOCK_AREA_M, size=(2, 2))
        if np.hypot(*(blocks[0] - blocks[1])) > _BLOCK_GAP_M:
            return blocks


def _draw(
    *,
    blocks: dict[int, np.ndarray],
    gripper: np.ndarray,
    closed: float,
    size: int,
    view_centre: np.ndarray,
    view_half_m: float,
) -> np.ndarray:
    """S S 3 uint8: the scene from above, edges smoothed over one pixel. Blocks by colour, lengths in metres."""
    pixel_m = 2 * view_half_m / size
    offsets = ((np.arange(size) + 0.5) * pixel_m - view_half_m).astype(np.float32)
    x = np.float32(view_centre[0]) + offsets
    y = np.float32(view_centre[1]) - offsets  # rows run downwards

    def box(centre: tuple[float, float], half: tuple[float, float], colour: tuple[float, ...]) -> None:
        columns, rows = _cover(x - centre[0], half[0], pixel_m), _cover(y - centre[1], half[1], pixel_m)
        inside = np.ix_(np.flatnonzero(rows), np.flatnonzero(columns))
        cover = (rows[:, None] * columns)[inside][..., None]
        image[inside] += cover * (np.array(colour, np.float32) - image[inside])

    image = np.full((size, size, 3), _FLOOR_COLOUR, np.float32)
    box((0.0, 0.0), (_TABLE_HALF_M, _TABLE_HALF_M), _TABLE_COLOUR)
    for plank in (-0.2, 0.0, 0.2):
        box((0.0, plank), (_TABLE_HALF_M, 0.05), _GRAIN_COLOUR)
    for number, (block_x, block_y) in blocks.items():
        box((block_x + 0.008, block_y - 0.008), (_BLOCK_HALF_M, _BLOCK_HALF_M), _SHADOW_COLOUR)
        box((block_x, block_y), (_BLOCK_HALF_M, _BLOCK_HALF_M), list(COLOURS.values())[number])
    finger_gap_m = 0.012 if closed else 0.03
    for side in (-1, 1):
        box((gripper[0] + side * finger_gap_m, gripper[1]), (0.007, 0.028), _GRIPPER_COLOUR)
    box((gripper[0], gripper[1] - 0.033), (finger_gap_m + 0.007, 0.006), _GRIPPER_COLOUR)
    return np.round(image).astype(np.uint8)


def _cover(offset_m: np.ndarray, half_m: float, pixel_m: float) -> np.ndarray:
    """S: the share of each pixel that lies within `half_m` of 0, along one axis."""
    return np.clip(0.5 + (half_m - np.abs(offset_m)) / pixel_m, 0.0, 1.0)
