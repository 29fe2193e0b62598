"""Images decode to what Pillow gives, the decoder of lerobot's own readers."""

import io
import itertools
import struct
import zlib

import numpy as np
import PIL.Image
import pytest

from openpi_accel.data import images
from openpi_accel.data.images import decode_image, image_format
from openpi_accel.errors import UserError


def picture(mode: str = "RGB", size: tuple[int, int] = (37, 23)) -> PIL.Image.Image:
    """A smooth picture with some noise: codecs meet both."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[: size[1], : size[0]]
    waves = [np.sin(x / (3 + c)) + np.cos(y / (5 - c)) for c in range(4)]
    values = np.stack(waves, -1) * 60 + 128 + rng.normal(0, 8, (*y.shape, 4))
    rgba = PIL.Image.fromarray(values.clip(0, 255).astype(np.uint8), "RGBA")
    return rgba if mode == "RGBA" else rgba.convert("RGB").convert(mode)


def encode(image: PIL.Image.Image, kind: str, **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"))


CASES = {
    "png": encode(picture(), "png"),
    "png, uncompressed": encode(picture(), "png", compress_level=0),
    "png, gray": encode(picture("L"), "png"),
    "png, palette": encode(picture().quantize(16), "png"),
    "png, palette with transparency": encode(picture().quantize(16), "png", transparency=3),
    "png, black and white": encode(picture("1"), "png"),
    "png, alpha": encode(picture("RGBA"), "png"),
    "png, transparent colour": encode(picture(), "png", transparency=(1, 2, 3)),
    "png, one pixel": encode(picture(size=(1, 1)), "png"),
    **{
        f"jpeg, quality {quality}, subsampling {sampling}": encode(
            picture(), "jpeg", quality=quality, subsampling=sampling
        )
        for quality, sampling in itertools.product((30, 75, 95), ("4:4:4", "4:2:2", "4:2:0"))
    },
    "jpeg, progressive": encode(picture(), "jpeg", progressive=True),
    "jpeg, gray": encode(picture("L"), "jpeg"),
    "jpeg, four colours": encode(picture("CMYK"), "jpeg"),
    "jpeg, kept as RGB": encode(picture(), "jpeg", keep_rgb=True),
    "webp": encode(picture(), "webp", lossless=True),
    "bmp": encode(picture(), "bmp"),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_pillow(case: str) -> None:
    image = decode_image(CASES[case])
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
    np.testing.assert_array_equal(image, by_pillow(CASES[case]))


@pytest.mark.parametrize("case", ["png", "jpeg, quality 75, subsampling 4:2:0", "jpeg, progressive"])
def test_the_usual_kinds_do_not_need_pillow(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_pillow(CASES[case])
    monkeypatch.setattr(images, "_decode_with_pillow", None)
    np.testing.assert_array_equal(decode_image(CASES[case]), expected)


def test_sixteen_bits_keep_their_high_byte() -> None:
    gray = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    image = decode_image(encode(PIL.Image.fromarray(gray), "png"))
    np.testing.assert_array_equal(image, np.repeat((gray >> 8).astype(np.uint8)[:, :, None], 3, axis=2))

    rgb = np.stack([gray, gray[::-1], gray.T], axis=2)
    data = png16(rgb)
    np.testing.assert_array_equal(decode_image(data), (rgb >> 8).astype(np.uint8))
    np.testing.assert_array_equal(decode_image(data), by_pillow(data))


def png16(rgb: np.ndarray) -> bytes:
    """16-bit RGB, which Pillow reads but does not write."""
    height, width, _ = rgb.shape
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in rgb)

    def block(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", zlib.compress(lines)) + block(b"IEND", b"")


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_orientation_is_applied(kind: str) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # stored lying, to be turned by 90 degrees
    data = encode(picture(), kind, exif=exif)
    turned = np.rot90(by_pillow(data), k=-1)
    np.testing.assert_array_equal(decode_image(data), turned)


@pytest.mark.parametrize("case", ["png", "png, alpha", "jpeg, quality 75, subsampling 4:2:0", "jpeg, progressive"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95])
def test_cut_short(case: str, share: float) -> None:
    data = CASES[case]
    with pytest.raises(UserError, match=r"bytes are not a whole image"):
        decode_image(data[: int(len(data) * share)])


def test_a_flipped_bit_is_noticed() -> None:
    data = bytearray(CASES["png"])
    data[len(data) // 2] ^= 1
    with pytest.raises(UserError, match="not a whole image"):
        decode_image(bytes(data))


def test_no_image() -> None:
    with pytest.raises(UserError, match="not a whole image"):
        decode_image(b"these are words, not pixels")


def test_format_names() -> None:
    assert image_format(CASES["png"]) == "png"
    assert image_format(CASES["jpeg, gray"]) == "jpeg"
    assert image_format(CASES["webp"]) == "webp"
    assert image_format(b"words") == "unknown"
