"""Video frames by torchcodec, where it is installed (extra lerobot); PyAV is the reference."""

import importlib
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from openpi_accel.config.schema import VideoDecoderName
from openpi_accel.data.video import FrameTable, OpenReader, VideoReader, read_frame_table
from openpi_accel.errors import UserError


def choose_reader(name: VideoDecoderName) -> OpenReader:
    """What opens a video file. `auto` is PyAV, which is always there and, unlike torchcodec, tells damaged frames.

    Raises:
        UserError: torchcodec is asked for and cannot be imported.
    """
    if name != "torchcodec":
        return VideoReader
    _decoder_class()
    return TorchcodecReader


class TorchcodecReader:
    """One open file, as `VideoReader`. Not for two threads at once."""

    def __init__(self, path: pathlib.Path, table: FrameTable | None = None) -> None:
        """Opens the file; `table` saves reading the packets again.

        Raises:
            UserError: the file is missing, no video, or cut short.
        """
        self.path = pathlib.Path(path)
        self.table = table or read_frame_table(self.path)
        try:
            # Exact: frames are numbered by the file's own time stamps, as in `FrameTable`.
            self._decoder = _decoder_class()(
                str(self.path), dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact"
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{self.path}: torchcodec cannot open this video ({_first_line(error)}).") from error
        found = self._decoder.metadata.num_frames
        if found != self.table.num_frames:
            raise UserError(
                f"{self.path}: torchcodec counts {found} frames and the file has {self.table.num_frames}, so frames "
                "would be mixed up. Take --data.video-decoder pyav."
            )

    def close(self) -> None:
        """Closes the file."""
        self._decoder = None

    def frames(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """The frames with these numbers, uint8 H W 3, in the order asked for.

        Raises:
            UserError: no such frame, or the file is damaged there.
        """
        wanted = [int(index) for index in indices]
        for index in wanted:
            if not 0 <= index < self.table.num_frames:
                raise UserError(
                    f"{self.path}: there is no frame {index}; the video has {self.table.num_frames} frames."
                )
        try:
            return list(self._decoder.get_frames_at(indices=wanted).data.numpy()) if wanted else []
        except (RuntimeError, ValueError, IndexError) as error:
            raise UserError(
                f"{self.path}: torchcodec cannot decode one of the frames {min(wanted)} to {max(wanted)} "
                f"({_first_line(error)}). The video is damaged or cut short; fetch it again."
            ) from error


def _decoder_class() -> Any:
    try:
        return importlib.import_module("torchcodec.decoders").VideoDecoder
    except (ImportError, RuntimeError, OSError) as error:  # the last two: it finds no FFmpeg, or another torch's
        raise UserError(
            f"--data.video-decoder torchcodec: torchcodec cannot be imported ({_first_line(error)}). Install it and "
            "FFmpeg (pip install 'openpi_accel[lerobot]', apt-get install ffmpeg), or take --data.video-decoder pyav."
        ) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
