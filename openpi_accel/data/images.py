"""Compressed camera images to pixels.

LeRobot's readers decode with Pillow; this module gives the same values, by faster codecs where those agree with it.
"""

import io

import imagecodecs
import numpy as np
import PIL.Image
import PIL.ImageOps

from openpi_accel.errors import UserError

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_JPEG_SIGNATURE = b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"
# Start-of-frame markers of JPEG (ITU T.81, table B.1): all of C0..CF but DHT, JPG and DAC.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_APP1, _JPEG_APP14, _JPEG_SCAN = 0xE1, 0xEE, 0xDA


def decode_image(data: bytes) -> np.ndarray:
    """The image as uint8 H W 3.

    8-bit RGB PNG goes through libspng and plain three-component JPEG through libjpeg-turbo, both exactly equal to
    Pillow and faster. Everything else (gray, palette, alpha, 16 bits, EXIF orientation, other formats) goes through
    Pillow: the orientation is applied, alpha is dropped, and 16-bit samples keep their high byte.

    Raises:
        UserError: the bytes are not a whole image.
    """
    try:
        if _is_plain_png(data):
            return _as_rgb(imagecodecs.spng_decode(data))
        if _is_plain_jpeg(data):
            return _as_rgb(imagecodecs.jpeg8_decode(data))
        return _decode_with_pillow(data)
    except UserError:
        raise
    except Exception as error:  # each codec has its own exception types; all mean the same here
        raise UserError(f"these {len(data)} bytes are not a whole image ({type(error).__name__}: {error})") from error


def image_format(data: bytes) -> str:
    """Name of the container, for people: png, jpeg, or what Pillow calls it."""
    if data.startswith(_PNG_SIGNATURE):
        return "png"
    if data.startswith(_JPEG_SIGNATURE):
        return "jpeg"
    try:
        return (PIL.Image.open(io.BytesIO(data)).format or "unknown").lower()
    except OSError:
        return "unknown"


def _as_rgb(image: np.ndarray) -> np.ndarray:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"the codec gave {image.dtype} {image.shape} for an RGB image")
    return image


def _is_plain_png(data: bytes) -> bool:
    """8 bits, RGB, not interlaced, no transparent colour and no orientation: PNG specification, chapter 11."""
    if not data.startswith(_PNG_SIGNATURE) or len(data) < 33:
        return False
    bit_depth, color_type, interlace = data[24], data[25], data[28]
    if (bit_depth, color_type, interlace) != (8, 2, 0):
        return False
    return b"tRNS" not in data and b"eXIf" not in data and b"Raw profile type exif" not in data


def _is_plain_jpeg(data: bytes) -> bool:
    """Three components, no EXIF and no Adobe colour transform before the first scan, and an end marker."""
    if not data.startswith(_JPEG_SIGNATURE) or _JPEG_END not in data[-64:]:
        return False  # Pillow says whether it is cut short
    at, components = 2, 0
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in (_JPEG_APP1, _JPEG_APP14):
            return False
        if marker in _JPEG_FRAMES and at + 9 < len(data):
            precision, components = data[at + 4], data[at + 9]
            if precision != 8:
                return False
        if marker == _JPEG_SCAN:
            return components == 3
        at += 2 + length
    return False


def _decode_with_pillow(data: bytes) -> np.ndarray:
    image: PIL.Image.Image = PIL.Image.open(io.BytesIO(data))
    image.load()
    image = PIL.ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode == "I":
        # Pillow's own conversion clips 16 bits at 255; it takes the high byte of 16-bit RGB, and so do we of gray.
        gray = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2)
    return np.array(image.convert("RGB"))
