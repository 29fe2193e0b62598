"""Exact video frames by integer index, with PyAV (which brings its own FFmpeg).

Frames are numbered in presentation order. The number of a frame comes from the time stamps of the packets, which are
read once per file without decoding, so any frame rate, B-frames and a first time stamp other than zero are exact.
"""

import collections
import contextlib
import dataclasses
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import av
import av.container
import av.error
import numpy as np
from av.video.reformatter import VideoReformatter

from openpi_accel.errors import UserError

# A seek flushes the decoder, which costs about as much as decoding this many more frames.
_SEEK_COST_FRAMES = 3


@dataclasses.dataclass(frozen=True)
class FrameTable:
    """Where the frames of one file are.

    Attributes:
        pts: (num_frames,) int64 presentation time stamps, ascending, in units of `time_base_s`.
        keys: (num_keys,) int64 frame numbers from which decoding can start, ascending.
        time_base_s: seconds per unit.
        height, width: pixels.
        codec: FFmpeg's name of the coding format, for example av1.
    """

    pts: np.ndarray
    keys: np.ndarray
    time_base_s: float
    height: int
    width: int
    codec: str

    @property
    def num_frames(self) -> int:
        """Frames that a decoder gives out."""
        return len(self.pts)

    @property
    def times_s(self) -> np.ndarray:
        """(num_frames,) float64 seconds since the first frame."""
        return (self.pts - self.pts[0]) * self.time_base_s


def read_frame_table(path: pathlib.Path) -> FrameTable:
    """Reads the packets of a file, decoding nothing.

    Raises:
        UserError: the file is missing, is no video, or is cut short.
    """
    with _explained(path), av.open(str(path)) as container:
        stream = _video_stream(container, path)
        pts, keys = [], []
        for packet in container.demux(stream):
            if packet.size == 0 or packet.is_discard:  # the flush packet; frames that an edit list cuts away
                continue
            if packet.pts is None:
                raise UserError(
                    f"{path}: its packets carry no time stamps, so frames cannot be told apart. Re-encode to mp4."
                )
            pts.append(packet.pts)
            if packet.is_keyframe:
                keys.append(packet.pts)
        if not pts or not keys:
            raise UserError(f"{path}: this video has no frames. Fetch the file again.")
        if len(pts) < stream.frames:
            raise UserError(
                f"{path}: the header promises {stream.frames} frames, but {len(pts)} are there: the file is cut short. "
                "Fetch it again."
            )
        ordered = np.sort(np.array(pts, np.int64))
        return FrameTable(
            pts=ordered,
            keys=np.searchsorted(ordered, np.sort(np.array(keys, np.int64))),
            time_base_s=float(stream.time_base),
            height=stream.height,
            width=stream.width,
            codec=stream.codec_context.codec.canonical_name,
        )


class VideoReader:
    """One open file. Not for two threads at once: `VideoPool` lends readers to threads.

    Reading goes on from where it stands when the wanted frame is ahead and no later key frame would be nearer, so
    frames in ascending order cost one decode each whatever the distance between key frames.
    """

    def __init__(self, path: pathlib.Path, table: FrameTable | None = None) -> None:
        """Opens the file; `table` saves reading the packets again.

        Raises:
            UserError: as `read_frame_table`.
        """
        self.path = pathlib.Path(path)
        self.table = table or read_frame_table(self.path)
        with _explained(self.path):
            self._container = av.open(str(self.path))
        self._stream = _video_stream(self._container, self.path)
        # Workers are the parallelism; more threads per decoder would only delay its first frame.
        self._stream.codec_context.thread_count = 1
        self._reformatter = VideoReformatter()
        self._decoded: Iterator[av.VideoFrame] | None = None
        self._next = 0

    def close(self) -> None:
        """Closes the file."""
        self._decoded = None
        self._container.close()

    def frames(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """The frames with these numbers, uint8 H W 3, in the order asked for; decoded in ascending order.

        Raises:
            UserError: no such frame, or the file is damaged there.
        """
        found = {index: self._frame(index) for index in sorted({int(i) for i in indices})}
        return [found[int(index)] for index in indices]

    def _frame(self, index: int) -> np.ndarray:
        if not 0 <= index < self.table.num_frames:
            raise UserError(f"{self.path}: there is no frame {index}; the video has {self.table.num_frames} frames.")
        key = int(np.searchsorted(self.table.keys, index, side="right")) - 1
        nearest = int(self.table.keys[key]) if key >= 0 else 0
        ahead = self._decoded is not None and self._next <= index and nearest <= self._next + _SEEK_COST_FRAMES
        if not ahead:
            self._seek(key)
        with _explained(self.path, index):
            while True:
                frame = self._decode_to(index)
                if frame is not None:
                    return self._reformatter.reformat(frame, format="rgb24").to_ndarray()
                # The demuxer landed behind the frame (it searches by decoding time): start one key frame earlier.
                if key < 0:
                    break
                key -= 1
                self._seek(key)
        raise UserError(f"{self.path}: frame {index} cannot be decoded. Fetch the file again.")

    def _seek(self, key: int) -> None:
        with _explained(self.path):
            if key >= 0:
                self._container.seek(int(self.table.pts[self.table.keys[key]]), stream=self._stream, backward=True)
            else:
                self._container.seek(int(self.table.pts[0]) - 1, stream=self._stream, backward=True)
        self._decoded = self._container.decode(self._stream)
        self._next = int(self.table.keys[key]) if key >= 0 else 0

    def _decode_to(self, index: int) -> av.VideoFrame | None:
        """Decodes up to frame `index`; None if the decoder is already past it or ends before it."""
        wanted, start = int(self.table.pts[index]), int(self.table.pts[self._next])
        decoded, self._decoded = self._decoded, None  # a decoder that fails is not used again
        assert decoded is not None
        for frame in decoded:
            if frame.pts is None or frame.pts < start:
                continue  # in an open group: shown before the key frame, and not decodable from it
            if frame.is_corrupt:  # H.264 paints over damage and goes on; later frames of the group rest on this one
                raise UserError(f"{self.path}, frame {index}: the video is damaged here. Fetch the file again.")
            if frame.pts < wanted:
                continue
            self._decoded, self._next = decoded, int(np.searchsorted(self.table.pts, frame.pts)) + 1
            return frame if frame.pts == wanted else None
        return None


class Reader(Protocol):
    """One open file; not for two threads at once."""

    path: pathlib.Path

    def frames(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """The frames with these numbers, uint8 H W 3, in the order asked for. Raises UserError as `VideoReader`."""

    def close(self) -> None:
        """Closes the file."""


OpenReader = Callable[[pathlib.Path, FrameTable], Reader]


class VideoPool:
    """Lends readers to threads and keeps idle ones open.

    At most `max_idle` files stay open between calls, plus one per thread in a call. Frame tables (8 to 16 bytes per
    frame) are kept up to `max_table_bytes`. An open 256 x 256 AV1 file takes 1 MB; opening it anew costs 1 ms.
    """

    def __init__(
        self, max_idle: int = 64, max_table_bytes: int = 256 << 20, open_reader: OpenReader = VideoReader
    ) -> None:
        self._open_reader = open_reader
        self._max_idle, self._max_table_bytes = max_idle, max_table_bytes
        self._lock = threading.Lock()
        self._idle: collections.OrderedDict[int, Reader] = collections.OrderedDict()
        self._tables: collections.OrderedDict[pathlib.Path, FrameTable] = collections.OrderedDict()
        self._table_bytes = 0

    def table(self, path: pathlib.Path) -> FrameTable:
        """The frame table of a file, read at its first use.

        Raises:
            UserError: as `read_frame_table`.
        """
        with self._lock:
            if path in self._tables:
                self._tables.move_to_end(path)
                return self._tables[path]
        table = read_frame_table(path)
        with self._lock:
            if path not in self._tables:
                self._tables[path] = table
                self._table_bytes += table.pts.nbytes + table.keys.nbytes
            while self._table_bytes > self._max_table_bytes and len(self._tables) > 1:
                _, old = self._tables.popitem(last=False)
                self._table_bytes -= old.pts.nbytes + old.keys.nbytes
        return table

    def frames(self, path: pathlib.Path, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """The frames of a file, uint8 H W 3, in the order asked for.

        Raises:
            UserError: as `VideoReader`.
        """
        reader = self._take(path) or self._open_reader(path, self.table(path))
        try:
            frames = reader.frames(indices)
        except BaseException:
            reader.close()  # its decoder may be in any state
            raise
        self._give_back(reader)
        return frames

    def close(self) -> None:
        """Closes every idle file."""
        with self._lock:
            readers = list(self._idle.values())
            self._idle.clear()
        for reader in readers:
            reader.close()

    def _take(self, path: pathlib.Path) -> Reader | None:
        with self._lock:
            for name in reversed(self._idle):
                if self._idle[name].path == path:
                    return self._idle.pop(name)
        return None

    def _give_back(self, reader: Reader) -> None:
        old = None
        with self._lock:
            self._idle[id(reader)] = reader
            if len(self._idle) > self._max_idle:
                _, old = self._idle.popitem(last=False)
        if old is not None:
            old.close()


def _video_stream(container: av.container.InputContainer, path: pathlib.Path) -> av.VideoStream:
    if not container.streams.video:
        raise UserError(f"{path}: there is no video stream in this file. It is damaged or cut short; fetch it again.")
    return container.streams.video[0]


@contextlib.contextmanager
def _explained(path: pathlib.Path, frame: int | None = None) -> Iterator[None]:
    where = f"{path}" if frame is None else f"{path}, frame {frame}"
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path}: this video file is missing. Fetch the dataset again, or restore the file.") from error
    except (av.error.FFmpegError, OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error  # its text would name the file once more
        raise UserError(
            f"{where}: the video cannot be read ({reason}). It is damaged or cut short; fetch it again."
        ) from error
