"""The first batch as one labelled picture: what the model is shown, to be looked at by a person."""

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_SIZE = 12  # of the letters, in pixels
_LINE = 15
_MAX_LINES = 5
_BACKGROUND, _INK = (255, 255, 255), (0, 0, 0)


def contact_sheet(images: Mapping[str, np.ndarray], captions: Sequence[str] = (), max_samples: int = 8) -> np.ndarray:
    """Cameras as rows below their names, samples as columns below their captions.

    Args:
        images: camera -> B H W 3 uint8, all of one B and W.
        captions: up to B texts; long ones are wrapped, and cut after a few lines.
        max_samples: columns at most.

    Returns:
        height width 3 uint8.
    """
    first = next(iter(images.values()))
    num_samples, width = min(max_samples, len(first)), first.shape[2]
    font = ImageFont.load_default(_SIZE)
    columns = [_wrap(caption, width, font) for caption in captions[:num_samples]]
    header = _LINE * max((len(lines) for lines in columns), default=0)
    strips = [_LINE + batch.shape[1] for batch in images.values()]
    sheet = Image.new("RGB", (num_samples * width, header + sum(strips)), _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    for i, lines in enumerate(columns):
        for j, line in enumerate(lines):
            draw.text((i * width + 2, j * _LINE), line, _INK, font)
    top = header
    for (name, batch), height in zip(images.items(), strips, strict=True):
        draw.text((2, top), name, _INK, font)
        for i in range(num_samples):
            sheet.paste(Image.fromarray(batch[i]), (i * width, top + _LINE))
        top += height
    return np.asarray(sheet)


def _wrap(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """Lines that are at most `width` pixels wide, by the font's mean letter; line breaks of the text stay."""
    letters = max(1, int((width - 4) / (font.getlength("abcdefghij klmnopqrst") / 21)))
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, letters) or [""]]
    return lines if len(lines) <= _MAX_LINES else [*lines[: _MAX_LINES - 1], lines[_MAX_LINES - 1][: letters - 1] + "…"]
