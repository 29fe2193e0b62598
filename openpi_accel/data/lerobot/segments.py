"""Where a value lies in its file, so that one image is read and not the page of a megabyte that holds it.

Pages are usually compressed by Snappy, which leaves what it cannot shorten, as encoded images, in the stream as it is
(literals of up to 64 KiB). So a value is a few byte ranges of the file. The stream's format is that of Snappy's
format description (google/snappy, format_description.txt).
"""

import bisect
import dataclasses
from collections.abc import Callable

import numpy as np

_MAX_ELEMENTS = 4096  # more means that the page compresses well: then it is read whole
_MAX_RANGES = 64


class Scattered(Exception):
    """The page is not made of few literals."""


@dataclasses.dataclass(frozen=True)
class Ranges:
    """Byte ranges of the values of a page.

    Attributes:
        offsets, sizes: of every range, in the file.
        starts: (num_values + 1,) first range of each value; a null has none.
    """

    offsets: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.offsets.nbytes + self.sizes.nbytes + self.starts.nbytes

    def value(self, at: int, read: Callable[[int, int], bytes]) -> bytes | None:
        """One value, by `read(offset, size)`; None for a null. Ranges close to each other are read at once."""
        first, last = int(self.starts[at]), int(self.starts[at + 1])
        if first == last:
            return None
        offsets, sizes = self.offsets[first:last].tolist(), self.sizes[first:last].tolist()
        low, high = min(offsets), max(offset + size for offset, size in zip(offsets, sizes, strict=True))
        if high - low <= 2 * sum(sizes):
            whole = read(low, high - low)
            parts = [whole[offset - low : offset - low + size] for offset, size in zip(offsets, sizes, strict=True)]
        else:
            parts = [read(offset, size) for offset, size in zip(offsets, sizes, strict=True)]
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Layout:
    """Which bytes of the file a stretch of a page's decompressed content is."""

    def __init__(self, elements: list[tuple[int, int, int]], size: int) -> None:
        """`elements`: (start in the content, offset in the file or -1, start of what it repeats), ascending."""
        self._elements, self._starts, self.size = elements, [start for start, _, _ in elements], size

    def ranges(self, start: int, end: int) -> list[tuple[int, int]]:
        """(offset, size) of content[start:end].

        Raises:
            Scattered: too many.
            ValueError: beyond the content.
        """
        if not 0 <= start <= end <= self.size:
            raise ValueError("a value reaches past the end of its page")
        found: list[tuple[int, int]] = []
        left = [(start, end)]
        while left:
            start, end = left.pop()
            if start == end:
                continue
            number = bisect.bisect_right(self._starts, start) - 1
            element_start, offset, source = self._elements[number]
            element_end = self._starts[number + 1] if number + 1 < len(self._starts) else self.size
            if end > element_end:
                left.append((element_end, end))
                end = element_end
            if offset >= 0:
                found.append((offset + start - element_start, end - start))
            else:
                # A copy may reach into itself: its first `period` bytes repeat.
                period = element_start - source
                at = (start - element_start) % period
                size = min(end - start, period - at)
                if start + size < end:
                    left.append((start + size, end))
                left.append((source + at, source + at + size))
            if len(found) + len(left) > _MAX_RANGES:
                raise Scattered
        return found


def plain_layout(offset: int, size: int) -> Layout:
    """Of a page that is not compressed."""
    return Layout([(0, offset, 0)], size)


def snappy_layout(data: bytes, offset: int) -> Layout:
    """Of a page compressed by Snappy.

    Args:
        data: the page as it is in the file.
        offset: where in the file.

    Raises:
        Scattered: too many elements.
        ValueError: the stream is damaged.
    """
    size, at = read_varint(data)
    elements: list[tuple[int, int, int]] = []
    done, end = 0, len(data)
    while at < end:
        if len(elements) == _MAX_ELEMENTS:
            raise Scattered
        tag = data[at]
        at += 1
        kind, number = tag & 3, tag >> 2
        if kind == 0:
            if number >= 60:
                width = number - 59
                number = int.from_bytes(data[at : at + width], "little")
                at += width
            elements.append((done, offset + at, 0))
            at += number + 1
            done += number + 1
            continue
        if kind == 1:
            length, back = 4 + (number & 7), (tag >> 5) << 8 | data[at]
            at += 1
        else:
            width = 2 if kind == 2 else 4
            length, back = number + 1, int.from_bytes(data[at : at + width], "little")
            at += width
        if not 0 < back <= done:
            raise ValueError("the page's compressed stream is damaged")
        elements.append((done, -1, done - back))
        done += length
    if at != end or done != size:
        raise ValueError("the page's compressed stream is damaged")
    return Layout(elements, size)


def collect(layout: Layout, places: np.ndarray, lengths: np.ndarray) -> Ranges:
    """The ranges of values.

    Args:
        layout: of the page.
        places: (num_values,) start of each value in the content; -1 for a null.
        lengths: (num_values,) bytes.
    """
    offsets: list[int] = []
    sizes: list[int] = []
    starts = [0]
    for place, length in zip(places.tolist(), lengths.tolist(), strict=True):
        for offset, size in layout.ranges(place, place + length) if place >= 0 else ():
            offsets.append(offset)
            sizes.append(size)
        starts.append(len(offsets))
    return Ranges(np.array(offsets, np.int64), np.array(sizes, np.int32), np.array(starts, np.int32))


def read_varint(data: bytes | memoryview, at: int = 0) -> tuple[int, int]:
    """A little-endian base-128 number, as Snappy and Thrift write lengths, and where it ends.

    Raises:
        ValueError: longer than a 64-bit number takes.
    """
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a damaged number")
