"""The labelled picture of the first batch: what is in it, and where."""

import numpy as np

from openpi_accel.train.contact_sheet import contact_sheet

SHADES = {"base_0_rgb": 10, "left_wrist_0_rgb": 200}


def sheet(captions: list[str], num: int = 3) -> np.ndarray:
    images = {name: np.full((num, 64, 224, 3), shade, np.uint8) for name, shade in SHADES.items()}
    return contact_sheet(images, captions)


def ink(picture: np.ndarray) -> np.ndarray:
    """Rows that hold letters on white."""
    return (picture < 128).all(axis=-1) & ~(picture == 10).all(axis=-1)


def test_every_image_is_whole_below_its_cameras_name() -> None:
    plain = sheet([])
    assert plain.shape[1] == 3 * 224
    for shade in SHADES.values():
        rows = np.flatnonzero((plain == shade).all(axis=(1, 2)))
        assert len(rows) == 64 and (np.diff(rows) == 1).all()
        assert ink(plain[rows[0] - 15 : rows[0], :150]).any() and not ink(plain[rows[0] - 15 : rows[0], 224:]).any()


def test_captions_stand_above_their_own_column() -> None:
    captions = ["row 3: episode 0 frame 3\npick up the black bowl", "", "row 7: episode 1 frame 2\nopen the drawer"]
    labelled, plain = sheet(captions), sheet([])
    header = labelled[: len(labelled) - len(plain)]
    assert len(header) >= 30
    assert [bool(ink(header[:, i * 224 : (i + 1) * 224]).any()) for i in range(3)] == [True, False, True]
    # Another text is another picture.
    assert not np.array_equal(sheet([captions[2], "", captions[2]]), labelled)


def test_a_long_prompt_is_wrapped_within_its_column_and_cut() -> None:
    labelled = sheet(["put the white mug on the left plate and " * 40, "", ""])
    header = labelled[: len(labelled) - len(sheet([]))]
    assert len(header) == 5 * 15 and ink(header[:, :224]).any() and not ink(header[:, 224:]).any()


def test_eight_columns_at_most() -> None:
    assert sheet([f"row {i}" for i in range(20)], num=20).shape[1] == 8 * 224
