"""Camera frames of dataset rows, whichever way they are stored. Rows, letters and order as in `dataset`."""

import pathlib
import threading

import numpy as np

from openpi_accel.data import now_reading
from openpi_accel.data.images import decode_image
from openpi_accel.data.lerobot.image_columns import ImageColumns
from openpi_accel.data.lerobot.index import Index, starts
from openpi_accel.data.video import FrameTable, OpenReader, VideoPool, VideoReader
from openpi_accel.errors import UserError


class FrameError(UserError):
    """A camera frame that cannot be read. Says where it belongs, for reports and skip lists.

    Attributes:
        row, episode, frame, camera: episode by the dataset's own number, frame within the episode.
        why: the rest of the message.
    """

    def __init__(self, root: pathlib.Path, row: int, episode: int, frame: int, camera: str, why: str) -> None:
        super().__init__(f"dataset {root}, episode {episode}, frame {frame}, camera {camera}: {why}")
        self.row, self.episode, self.frame, self.camera, self.why = row, episode, frame, camera, why
        self._arguments = root, row, episode, frame, camera, why

    def __reduce__(self) -> tuple[type["FrameError"], tuple[pathlib.Path, int, int, int, str, str]]:
        return FrameError, self._arguments


class FrameReader:
    """Reads frames of ascending rows. Safe to use from several threads."""

    def __init__(self, root: pathlib.Path, index: Index, open_video: OpenReader = VideoReader) -> None:
        self._root, self._index = root, index
        self._images = ImageColumns(root)
        self._videos = VideoPool(open_reader=open_video)
        self._lock = threading.Lock()
        self._first_frames: dict[tuple[str, int], dict[int, int]] = {}

    def close(self) -> None:
        """Closes open files and forgets what is cached."""
        self._videos.close()
        self._images.clear()

    def read(self, camera: str, rows: np.ndarray) -> list[np.ndarray]:
        """uint8 H W 3 for each of the rows, which ascend without repeats.

        Raises:
            FrameError: a frame is missing or damaged.
        """
        return self._from_video(camera, rows) if camera in self._index.clips else self._from_images(camera, rows)

    def image_bytes(self, camera: str, row: int) -> bytes:
        """The encoded image of one row, of a camera kept in parquet.

        Raises:
            FrameError: it is not there.
        """
        path, at = self._data_file(row)
        try:
            return self._images.read(path, camera, [at])[0]
        except UserError as error:
            raise self.error(camera, row, str(error)) from error

    def video_table(self, camera: str, row: int) -> FrameTable:
        """Size, codec and time stamps of the video that holds a row's frame.

        Raises:
            FrameError: the file is missing or damaged.
        """
        clips = self._index.clips[camera]
        try:
            return self._videos.table(clips.files[int(clips.file_of[self._episode_of(row)])])
        except UserError as error:
            raise self.error(camera, row, str(error)) from error

    def _episode_of(self, row: int) -> int:
        return int(np.searchsorted(self._index.episode_starts, row, side="right")) - 1

    def _data_file(self, row: int) -> tuple[pathlib.Path, int]:
        file = int(np.searchsorted(self._index.data_starts, row, side="right")) - 1
        return self._index.data_files[file], row - int(self._index.data_starts[file])

    def error(self, camera: str, row: int, why: str) -> FrameError:
        """The error that names this frame."""
        episode = self._episode_of(row)
        frame = row - int(self._index.episode_starts[episode])
        return FrameError(self._root, row, int(self._index.episode_ids[episode]), frame, camera, why)

    def _note(self, row: int) -> None:
        episode = self._episode_of(row)
        now_reading.note(int(self._index.episode_ids[episode]), row - int(self._index.episode_starts[episode]))

    def _from_images(self, camera: str, rows: np.ndarray) -> list[np.ndarray]:
        frames = []
        for row in rows.tolist():
            self._note(row)
            data = self.image_bytes(camera, row)
            try:
                frames.append(decode_image(data))
            except UserError as error:
                raise self.error(camera, row, f"{error}, in {self._data_file(row)[0]}") from error
        return frames

    def _from_video(self, camera: str, rows: np.ndarray) -> list[np.ndarray]:
        clips, episode_starts = self._index.clips[camera], self._index.episode_starts
        episodes = np.searchsorted(episode_starts, rows, side="right") - 1
        files = clips.file_of[episodes]
        frames: dict[int, np.ndarray] = {}
        for file in np.unique(files).tolist():
            mine = np.flatnonzero(files == file).tolist()
            path = clips.files[file]
            try:
                first = self._first_frame(camera, file)
            except UserError as error:
                raise self.error(camera, int(rows[mine[0]]), str(error)) from error
            numbers = [first[int(episodes[i])] + int(rows[i] - episode_starts[episodes[i]]) for i in mine]
            self._note(int(rows[mine[0]]))  # and the following ones, in the same file
            try:
                found = self._videos.frames(path, numbers)
            except UserError:  # one by one, so that the error names the row
                found = [self._one(camera, int(rows[i]), path, number) for i, number in zip(mine, numbers, strict=True)]
            frames.update(zip(mine, found, strict=True))
        return [frames[i] for i in range(len(rows))]

    def _one(self, camera: str, row: int, path: pathlib.Path, number: int) -> np.ndarray:
        try:
            return self._videos.frames(path, [number])[0]
        except UserError as error:
            raise self.error(camera, row, str(error)) from error

    def _first_frame(self, camera: str, file: int) -> dict[int, int]:
        """Position of an episode -> number of its first frame in the video file; for the file's episodes.

        Where the episodes fill the file exactly, this is the running sum of their lengths. Otherwise (a file that also
        holds frames of deleted episodes) it is the frame nearest to the declared time, by the file's own time stamps.
        """
        with self._lock:
            if (camera, file) in self._first_frames:
                return self._first_frames[camera, file]
        clips, episode_starts = self._index.clips[camera], self._index.episode_starts
        table = self._videos.table(clips.files[file])
        episodes = np.flatnonzero(clips.file_of == file)
        episodes = episodes[np.argsort(clips.from_s[episodes], kind="stable")]
        lengths = episode_starts[episodes + 1] - episode_starts[episodes]
        if lengths.sum() == table.num_frames:
            first = starts(lengths)[:-1]
        else:
            times, declared = table.times_s, clips.from_s[episodes]
            right = np.clip(np.searchsorted(times, declared), 0, table.num_frames - 1)
            left = np.maximum(right - 1, 0)
            first = np.where(declared - times[left] <= np.abs(times[right] - declared), left, right)
            off = np.abs(times[first] - declared) > 0.5 / self._index.info.fps
            wrong = np.flatnonzero((first + lengths > table.num_frames) | off)
            if len(wrong):
                i = wrong[0]
                raise UserError(
                    f"{clips.files[file]} has {table.num_frames} frames, but episode "
                    f"{self._index.episode_ids[episodes[i]]} with {lengths[i]} frames starts {declared[i]:.3f} s into "
                    "it. The video is cut short or from another version of the dataset; fetch it again."
                )
        result = dict(zip(episodes.tolist(), first.tolist(), strict=True))
        with self._lock:
            self._first_frames[camera, file] = result
        return result
