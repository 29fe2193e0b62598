"""Reads the packed cache: every consumed camera's frames, decoded and resized once, as raw pixels.

<folder>/manifest.json     what is packed, of which dataset files, and each shard's checksum
<folder>/shard-00000.bin   rows x cameras x 224 x 224 x 3 uint8, one after the other

A sample's cameras lie side by side, so that it costs one read of about 300 kB. The reads go by preadv straight into the
batch: as fast as copying out of a memory map where the file is in memory, and without a page fault per 4 kB where not.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from openpi_accel.config.schema import IMAGE_SIZE
from openpi_accel.data.lerobot.dataset import LeRobotDataset
from openpi_accel.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
# What the pixels went through; a pack made by anything else is not read.
TRANSFORMS = f"uint8 HWC, PIL bilinear letterbox {IMAGE_SIZE}"
FRAME_BYTES = IMAGE_SIZE * IMAGE_SIZE * 3
_HASH_BLOCK_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileState:
    """One file of the dataset: when it was last written, how long it is, and what is in it."""

    size: int
    mtime_ns: int
    sha256: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a packed folder holds.

    Attributes:
        dataset: hash of the dataset's index (`LeRobotDataset.fingerprint`).
        transforms: what the pixels went through.
        cameras: keys, in the order of a row's frames.
        num_rows, rows_per_shard: all rows of the dataset; the last shard may have fewer.
        files: dataset file, relative to its folder -> its state when it was packed.
        shards: crc32 of each shard's pixels; None where it is not packed yet.
        bad: (row, camera, reason) of frames that could not be decoded; their pixels are zero.
    """

    dataset: str
    transforms: str
    cameras: tuple[str, ...]
    num_rows: int
    rows_per_shard: int
    files: Mapping[str, FileState]
    shards: tuple[int | None, ...]
    bad: tuple[tuple[int, str, str], ...] = ()
    format: int = FORMAT

    @property
    def record_bytes(self) -> int:
        """Bytes of one row."""
        return len(self.cameras) * FRAME_BYTES

    @property
    def complete(self) -> bool:
        """Whether every shard is there."""
        return None not in self.shards

    def rows_of(self, shard: int) -> range:
        """The dataset rows of a shard."""
        return range(shard * self.rows_per_shard, min((shard + 1) * self.rows_per_shard, self.num_rows))


def shard_path(folder: pathlib.Path, shard: int) -> pathlib.Path:
    """Where a shard is."""
    return folder / f"shard-{shard:05d}.bin"


def read_manifest(folder: pathlib.Path) -> Manifest | None:
    """The manifest; None where there is none.

    Raises:
        UserError: it is damaged or of another version.
    """
    path = folder / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}; this version reads {FORMAT}")
        content["files"] = {name: FileState(**state) for name, state in content["files"].items()}
        content["bad"] = tuple((row, camera, why) for row, camera, why in content["bad"])
        return Manifest(**content | {"cameras": tuple(content["cameras"]), "shards": tuple(content["shards"])})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be used ({error}). Delete {folder} and pack the dataset again.") from error


def write_manifest(folder: pathlib.Path, manifest: Manifest) -> None:
    """Puts the manifest in place as a whole."""
    aside = folder / f".{MANIFEST}.tmp"
    with aside.open("w") as file:
        json.dump(dataclasses.asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, folder / MANIFEST)


def file_states(dataset: LeRobotDataset) -> dict[str, FileState]:
    """Size and time of every file that pixels or rows come from, by its path below the dataset's folder."""
    states = {}
    for path in dataset.files():
        try:
            stat = path.stat()
        except OSError:
            continue  # reading its frames gives the error that names it
        name = path.relative_to(dataset.root).as_posix()
        states[name] = FileState(size=stat.st_size, mtime_ns=stat.st_mtime_ns)
    return states


def hash_file(path: pathlib.Path) -> str:
    """sha256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def changes(manifest: Manifest, dataset: LeRobotDataset) -> tuple[list[str], list[str]]:
    """How the dataset differs from what was packed.

    Returns:
        What certainly changed, one line each; and the files that have only another time, whose content decides.
    """
    changed = []
    if manifest.transforms != TRANSFORMS:
        changed.append(f"pixels went through: {manifest.transforms}; this version: {TRANSFORMS}")
    if manifest.dataset != dataset.fingerprint():
        changed.append("the dataset's index (episodes, features, tasks or file sizes)")
    touched = []
    now = file_states(dataset)
    for name in sorted({*now, *manifest.files}):
        old, new = manifest.files.get(name), now.get(name)
        if old is None or new is None or old.size != new.size:
            changed.append(name)
        elif old.mtime_ns != new.mtime_ns:
            touched.append(name)
    return changed, touched


class PackedFrames:
    """A complete pack of this dataset. Safe to use from several threads.

    Attributes:
        folder: where it is.
        cameras: the packed cameras.
    """

    def __init__(self, folder: pathlib.Path, dataset: LeRobotDataset, cameras: Sequence[str], command: str) -> None:
        """Opens the shards.

        Args:
            folder: of the pack.
            dataset: what must have been packed.
            cameras: keys that must be there.
            command: what packs the dataset, for messages.

        Raises:
            UserError: no pack, not complete, of other cameras, or the dataset has changed since.
        """
        self.folder, self._root = folder, dataset.root
        mend = f"Pack it with: {command}"
        manifest = read_manifest(folder)
        if manifest is None:
            raise UserError(f"--data.packed is {folder}, where nothing is packed. {mend}")
        if not manifest.complete:
            done = sum(shard is not None for shard in manifest.shards)
            raise UserError(f"{folder} has {done} of {len(manifest.shards)} shards. Go on with: {command}")
        changed, touched = changes(manifest, dataset)
        if changed or touched:
            names = ", ".join((changed + touched)[:4]) + (", …" if len(changed + touched) > 4 else "")
            advice = (
                f"Pack it anew with: {command} --overwrite"
                if changed
                else f"If the files were only copied, this compares their contents and keeps the pack: {command}"
            )
            raise UserError(f"{dataset.root} is not what was packed into {folder}: {names}. {advice}")
        missing = [camera for camera in cameras if camera not in manifest.cameras]
        if missing:
            raise UserError(
                f"{folder} holds the cameras {', '.join(manifest.cameras)}, not {', '.join(missing)}. Pack them too: "
                f"{command} --overwrite"
            )
        for shard in range(len(manifest.shards)):
            path, expected = shard_path(folder, shard), len(manifest.rows_of(shard)) * manifest.record_bytes
            if not path.is_file() or path.stat().st_size != expected:
                raise UserError(f"{path} is missing or cut short. Go on with: {command}")
        self.cameras = manifest.cameras
        self._manifest, self._arguments = manifest, (folder, dataset, tuple(cameras), command)
        self._bad = {(row, camera): why for row, camera, why in manifest.bad}
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}
        weakref.finalize(self, _close, self._files)

    def __reduce__(self) -> tuple[Callable[..., "PackedFrames"], tuple[Any, ...]]:
        return PackedFrames, self._arguments  # another process opens its own files

    def read(self, rows: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Fills in the frames of these rows.

        Args:
            rows: B dataset rows.
            out: camera -> B 224 224 3 uint8, C-contiguous.

        Raises:
            FrameError: a frame that was bad when it was packed.
            UserError: a shard is gone or cut short.
        """
        manifest = self._manifest
        order = [(manifest.cameras.index(camera), camera) for camera in out]
        first, last = min(order)[0], max(order)[0]
        if self._bad:
            for row in rows.tolist():
                for _, camera in order:
                    if (row, camera) in self._bad:
                        raise self._arguments[1].frame_error(camera, row, self._bad[row, camera])
        whole = len(order) == last - first + 1
        names = [camera for _, camera in sorted(order)]
        spare = None if whole else np.empty((last - first + 1, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
        for i, row in enumerate(rows.tolist()):
            shard, at = divmod(row, manifest.rows_per_shard)
            offset = at * manifest.record_bytes + first * FRAME_BYTES
            if spare is None:
                self._fill(shard, offset, [out[camera][i] for camera in names])
            else:  # cameras in between that nobody asked for
                self._fill(shard, offset, [spare])
                for number, camera in order:
                    out[camera][i] = spare[number - first]

    def close(self) -> None:
        """Closes the shards; the pack stays usable."""
        with self._lock:
            _close(self._files)

    def _fill(self, shard: int, offset: int, buffers: list[np.ndarray]) -> None:
        wanted = sum(buffer.nbytes for buffer in buffers)
        try:
            got = os.preadv(self._file(shard), buffers, offset)
        except OSError as error:
            raise UserError(f"{shard_path(self.folder, shard)} cannot be read ({error}).") from error
        if got != wanted:
            raise UserError(f"{shard_path(self.folder, shard)} is cut short. Pack the dataset again.")

    def _file(self, shard: int) -> int:
        with self._lock:
            if shard not in self._files:
                self._files[shard] = os.open(shard_path(self.folder, shard), os.O_RDONLY | os.O_CLOEXEC)
                # Rows come in random order: reading on behind each would only push others out of memory.
                os.posix_fadvise(self._files[shard], 0, 0, os.POSIX_FADV_RANDOM)
            return self._files[shard]


def _close(files: dict[int, int]) -> None:
    while files:
        os.close(files.popitem()[1])
