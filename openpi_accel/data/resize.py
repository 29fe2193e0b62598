"""Letterbox resize, equal to upstream's to the bit (Pillow's bilinear filter)."""

import numpy as np
from PIL import Image

from openpi_accel.config.schema import IMAGE_SIZE


def resize_with_pad(image: np.ndarray, size: int = IMAGE_SIZE) -> np.ndarray:
    """Shrinks or enlarges an image into a square, keeping its aspect, with black bars.

    Args:
        image: H W 3 uint8.
        size: side of the square in pixels.

    Returns:
        size size 3 uint8; the input itself where it already has that size.
    """
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    ratio = max(width / size, height / size)
    # int() truncates: 224x300 becomes 167 rows, not 168. The rounding is part of the contract.
    new_height, new_width = int(height / ratio), int(width / ratio)
    resized = np.asarray(Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BILINEAR))
    if (new_height, new_width) == (size, size):
        return resized
    top, left = int((size - new_height) / 2), int((size - new_width) / 2)
    square = np.zeros((size, size, 3), np.uint8)
    square[top : top + new_height, left : left + new_width] = resized
    return square
