"""Which columns feed the model."""

import dataclasses

import pytest

from openpi_accel.config.presets import get_preset
from openpi_accel.config.schema import CameraKeys, DataConfig
from openpi_accel.data.lerobot.dataset import open_dataset
from openpi_accel.data.mapping import propose_mapping, resolve_mapping
from openpi_accel.errors import UserError
from tests.data_fakes import FakeDataset


@pytest.mark.parametrize(
    ("cameras", "expected"),
    [
        (
            ("observation.images.base", "observation.images.wrist"),
            ("observation.images.base", "observation.images.wrist", None),
        ),
        (("image", "wrist_image"), ("image", "wrist_image", None)),
        (
            ("observation.images.wrist_image", "observation.images.image"),
            ("observation.images.image", "observation.images.wrist_image", None),
        ),
        (
            ("cam_high", "cam_low", "cam_right_wrist", "cam_left_wrist"),
            ("cam_high", "cam_left_wrist", "cam_right_wrist"),
        ),
        (("agentview_image", "robot0_eye_in_hand_image"), ("agentview_image", "robot0_eye_in_hand_image", None)),
        (
            ("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left"),
            ("exterior_image_1_left", "wrist_image_left", None),
        ),
        (
            ("observation.images.gripper", "observation.images.top", "observation.images.front"),
            ("observation.images.front", "observation.images.gripper", None),
        ),
        (("wrist_1", "wrist_2", "base"), ("base", "wrist_1", "wrist_2")),
        (("right_wrist", "front"), ("front", None, "right_wrist")),
        (("webcam",), ("webcam", None, None)),
        (("wrist",), (None, "wrist", None)),
        (("front_depth", "front"), ("front", None, None)),
    ],
)
def test_cameras_are_proposed_by_name_and_said(cameras, expected):
    mapping = propose_mapping(FakeDataset(cameras=cameras))
    chosen = mapping.cameras
    assert (chosen.base_0_rgb, chosen.left_wrist_0_rgb, chosen.right_wrist_0_rgb) == expected
    notes = "\n".join(mapping.notes)
    for slot, key in chosen.as_dict().items():
        assert f"{slot} <- {key}" in notes
    for key in set(cameras) - set(expected):
        assert key in notes.split("cameras not used: ")[1]


def test_a_depth_map_is_no_colour_camera():
    dataset = FakeDataset(cameras=("top", "front"))
    dataset.cameras["front"] = dataclasses.replace(dataset.cameras["front"], depth=True)
    assert propose_mapping(dataset).cameras.base_0_rgb == "top"


@pytest.mark.parametrize("cameras", [("cam_a", "cam_b"), ()])
def test_when_no_name_fits_the_cameras_are_listed(cameras):
    with pytest.raises(UserError, match=f"Cameras are: {', '.join(cameras) or 'none'}.*--data.cameras.base-0-rgb"):
        propose_mapping(FakeDataset(cameras=cameras))


def test_a_configured_mapping_is_taken_as_it_is_and_typos_get_a_suggestion():
    dataset = FakeDataset(cameras=("front", "wrist"))
    mapping = resolve_mapping(DataConfig(repo_id="d", cameras=CameraKeys(right_wrist_0_rgb="front")), dataset)
    assert mapping.cameras.as_dict() == {"right_wrist_0_rgb": "front"}
    assert mapping.notes == ("state <- observation.state", "actions <- action")
    with pytest.raises(UserError, match=r"no camera 'frnt' \(for base_0_rgb\). Did you mean 'front'"):
        resolve_mapping(DataConfig(repo_id="d", cameras=CameraKeys(base_0_rgb="frnt")), dataset)


def test_columns_are_found_by_usual_or_given_name():
    dataset = FakeDataset(state_key="qpos", action_key="actions", state_dim=5, action_dim=2)
    with pytest.raises(UserError, match=r"--data.state-key; numeric columns are: qpos, actions"):
        propose_mapping(dataset)
    mapping = resolve_mapping(DataConfig(repo_id="d", state_key="qpos"), dataset)
    assert (mapping.state_key, mapping.state_dim, mapping.action_key, mapping.action_dim) == ("qpos", 5, "actions", 2)
    with pytest.raises(UserError, match=r"no numeric column 'qps' \(--data.state-key\). Did you mean 'qpos'"):
        resolve_mapping(DataConfig(repo_id="d", state_key="qps"), dataset)
    with pytest.raises(UserError, match=r"no numeric column 'observation.images.base'"):
        resolve_mapping(DataConfig(repo_id="d", state_key="qpos", action_key="observation.images.base"), dataset)


@pytest.mark.shared
def test_real_datasets(shared):
    libero = resolve_mapping(get_preset("pi05_libero").data, open_dataset(shared / "datasets" / "libero_shaped_v20"))
    assert libero.cameras.as_dict() == {"base_0_rgb": "image", "left_wrist_0_rgb": "wrist_image"}
    assert (libero.state_key, libero.state_dim, libero.action_key, libero.action_dim) == ("state", 8, "actions", 7)
    robosuite = propose_mapping(open_dataset(shared / "datasets" / "robosuite_lift_v30"))
    assert robosuite.cameras.as_dict() == {
        "base_0_rgb": "observation.images.image",
        "left_wrist_0_rgb": "observation.images.wrist_image",
    }
    assert (robosuite.state_key, robosuite.action_key) == ("observation.state", "action")
