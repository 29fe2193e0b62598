"""A drawn table-top task whose right action can be told only from the pictures and the prompt together.

Coloured trays stand on a table. The prompt names one of them, the pictures show where the gripper is; the gripper
starts anywhere, moves to the tray and closes. The robot state is how far the fingers are open: it says nothing about
where the gripper is or where it is to go. A base camera sways above the table; a wrist camera travels with the gripper.

Shape letters: T frames of an episode, S image side in pixels. World coordinates: metres, x to the right, y up, the
table's centre at the origin.
"""

import dataclasses
import functools

import numpy as np

COLOURS = {"red": (205, 30, 35), "green": (25, 165, 50), "blue": (30, 70, 215)}
TASKS = tuple(f"move to the {colour} tray" for colour in COLOURS)
STATE_NAMES = ("left_finger", "right_finger")
ACTION_NAMES = ("vx", "vy", "gripper")
FPS = 10

# Where each tray stands, up to a scatter that only the pictures show.
_TRAYS_M = np.array([(-0.18, 0.15), (0.18, 0.15), (0.0, -0.18)])
_SCATTER_M = 0.03
_TABLE_HALF_M = 0.30
_TRAY_HALF_M = 0.07
_START_AREA_M = 0.25
_REACHED_M = 0.03
_GAIN_PER_S = 3.0  # near the tray the gripper slows down
_MAX_SPEED_M_S = 0.2
_TREMBLE_M_S = 0.04
_HOLD_FRAMES = 4  # an episode ends when the gripper has been closed for so long
_MAX_FRAMES = 40
_FINGER_OPEN_M, _FINGER_CLOSED_M = 0.03, 0.012
_FINGER_NOISE_M = 0.0005
_BASE_VIEW_HALF_M = 0.36
_WRIST_VIEW_HALF_M = 0.40
_SWAY_M = 0.02

_TABLE_COLOUR = (136, 131, 125)
_GRAIN_COLOUR = (127, 122, 116)
_SHADOW_COLOUR = (84, 81, 78)
_FLOOR_COLOUR = (100, 103, 110)
_GRIPPER_COLOUR = (28, 28, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """One demonstration.

    Attributes:
        task_index: T int64, which of TASKS is the prompt.
        state: T 2 float32, distance of each finger from the middle in metres.
        action: T 3 float32, velocity towards the named tray in m/s, and the gripper command (0 open, 1 closed).
        base: T S S 3 uint8, the camera above the table.
        wrist: T S S 3 uint8, the camera on the gripper.
    """

    task_index: np.ndarray
    state: np.ndarray
    action: np.ndarray
    base: np.ndarray
    wrist: np.ndarray


def make_episode(rng: np.random.Generator, *, task: int, image_size: int) -> Episode:
    """Plays and draws one demonstration of TASKS[task]; equal generators give equal episodes.

    The hand trembles: what moves the gripper is the recorded command plus a disturbance, so that demonstrations leave
    the straight line and show how to come back to it (Laskey et al. 2017, DART). Scene and start do not depend on the
    task.
    """
    trays = _TRAYS_M + rng.uniform(-_SCATTER_M, _SCATTER_M, size=_TRAYS_M.shape)
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
        to_tray = trays[task] - position
        distance = float(np.hypot(*to_tray))
        velocity = to_tray * min(_GAIN_PER_S, _MAX_SPEED_M_S / max(distance, 1e-9))
        command = max(closed, float(distance < _REACHED_M))
        sway = _SWAY_M * np.array([np.sin(2.5 * time_s + sway_phase), np.cos(1.7 * time_s + sway_phase)])
        draw = functools.partial(_draw, trays=trays, gripper=position, closed=closed, size=image_size)
        fingers = _FINGER_CLOSED_M if closed else _FINGER_OPEN_M
        state.append(fingers + _FINGER_NOISE_M * rng.standard_normal(2))
        action.append([*velocity.tolist(), command])
        base.append(draw(view_centre=sway, view_half_m=_BASE_VIEW_HALF_M))
        wrist.append(draw(view_centre=position, view_half_m=_WRIST_VIEW_HALF_M))
        tremble = 0.7 * tremble + _TREMBLE_M_S * rng.standard_normal(2)
        position = np.clip(position + (velocity + tremble) / FPS, -_TABLE_HALF_M, _TABLE_HALF_M)
        closed = command
        num_closed += int(closed)
    return Episode(
        task_index=np.full(len(state), task),
        state=np.asarray(state, np.float32),
        action=np.asarray(action, np.float32),
        base=np.stack(base),
        wrist=np.stack(wrist),
    )


def _draw(
    *, trays: np.ndarray, gripper: np.ndarray, closed: float, size: int, view_centre: np.ndarray, view_half_m: float
) -> np.ndarray:
    """S S 3 uint8: the scene from above, edges smoothed over one pixel. Lengths in metres."""
    pixel_m = 2 * view_half_m / size
    offsets = ((np.arange(size) + 0.5) * pixel_m - view_half_m).astype(np.float32)
    x = np.float32(view_centre[0]) + offsets
    y = np.float32(view_centre[1]) - offsets  # rows run downwards

    def box(centre: tuple[float, float], half: tuple[float, float], colour: tuple[int, ...]) -> None:
        columns, rows = _cover(x - centre[0], half[0], pixel_m), _cover(y - centre[1], half[1], pixel_m)
        inside = np.ix_(np.flatnonzero(rows), np.flatnonzero(columns))
        cover = (rows[:, None] * columns)[inside][..., None]
        image[inside] += cover * (np.array(colour, np.float32) - image[inside])

    image = np.full((size, size, 3), _FLOOR_COLOUR, np.float32)
    box((0.0, 0.0), (_TABLE_HALF_M, _TABLE_HALF_M), _TABLE_COLOUR)
    for plank in (-0.2, 0.0, 0.2):
        box((0.0, plank), (_TABLE_HALF_M, 0.05), _GRAIN_COLOUR)
    for (tray_x, tray_y), colour in zip(trays, COLOURS.values(), strict=True):
        box((tray_x + 0.008, tray_y - 0.008), (_TRAY_HALF_M, _TRAY_HALF_M), _SHADOW_COLOUR)
        box((tray_x, tray_y), (_TRAY_HALF_M, _TRAY_HALF_M), colour)
    fingers = _FINGER_CLOSED_M if closed else _FINGER_OPEN_M
    for side in (-1, 1):
        box((gripper[0] + side * fingers, gripper[1]), (0.008, 0.03), _GRIPPER_COLOUR)
    box((gripper[0], gripper[1] - 0.036), (fingers + 0.008, 0.007), _GRIPPER_COLOUR)
    return np.round(image).astype(np.uint8)


def _cover(offset_m: np.ndarray, half_m: float, pixel_m: float) -> np.ndarray:
    """S: the share of each pixel that lies within `half_m` of 0, along one axis."""
    return np.clip(0.5 + (half_m - np.abs(offset_m)) / pixel_m, 0.0, 1.0)
