"""Writes the packed cache (`packed`): shard by shard, each put in place whole; what was stopped goes on."""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from openpi_accel.config.schema import IMAGE_SIZE
from openpi_accel.data.lerobot.dataset import LeRobotDataset
from openpi_accel.data.lerobot.frames import FrameError
from openpi_accel.data.packed import (
    FRAME_BYTES,
    MANIFEST,
    TRANSFORMS,
    Manifest,
    changes,
    file_states,
    hash_file,
    read_manifest,
    shard_path,
    write_manifest,
)
from openpi_accel.data.transforms import to_model_image
from openpi_accel.errors import UserError
from openpi_accel.sizes import format_bytes

SHARD_BYTES = 1 << 30
_BLOCK_ROWS = 64
_LOCK = "packing.lock"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What there is to do.

    Attributes:
        manifest: of the pack as it stands.
        total_bytes, left_bytes: of the whole pack, and of the shards that are not there yet.
        free_bytes: on that disk.
    """

    manifest: Manifest
    total_bytes: int
    left_bytes: int
    free_bytes: int


def plan(
    folder: pathlib.Path,
    dataset: LeRobotDataset,
    cameras: Sequence[str],
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Plan:
    """Looks at what is there; writes nothing. Reads the contents of files that have only another time than before.

    Args:
        folder: where the pack goes.
        dataset: what to pack.
        cameras: which of its cameras.
        overwrite: plan to replace a pack of something else.
        shard_bytes: about how large a shard is.

    Raises:
        UserError: there is a pack of something else; the folder has other things in it.
    """
    old = read_manifest(folder)
    if (
        old is None
        and folder.is_dir()
        and any(path.name not in (_LOCK, f".{MANIFEST}.tmp") for path in folder.iterdir())
    ):
        raise UserError(f"{folder} is not empty and holds no pack. Choose another folder for --data.packed.")
    if old is not None:
        changed, touched = changes(old, dataset)
        old, rewritten = _compare_contents(dataset, old, touched)
        changed += rewritten
        if set(old.cameras) != set(cameras):
            changed.append(f"the cameras (packed: {', '.join(old.cameras)})")
        if changed and not overwrite:
            raise UserError(
                f"{folder} holds a pack of something else; these differ: {', '.join(changed[:4])}. Add --overwrite to "
                "replace it, or choose another folder for --data.packed."
            )
        if changed:
            old = None
    if old is None:
        rows = max(1, shard_bytes // (len(cameras) * FRAME_BYTES))
        old = Manifest(
            dataset=dataset.fingerprint(),
            transforms=TRANSFORMS,
            cameras=tuple(cameras),
            num_rows=dataset.num_frames,
            rows_per_shard=rows,
            files=file_states(dataset),
            shards=(None,) * -(-dataset.num_frames // rows),
        )
    old = dataclasses.replace(old, shards=tuple(_present(folder, old, shard) for shard in range(len(old.shards))))
    left = sum(len(old.rows_of(shard)) for shard, crc in enumerate(old.shards) if crc is None)
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return Plan(
        manifest=old,
        total_bytes=old.num_rows * old.record_bytes,
        left_bytes=left * old.record_bytes,
        free_bytes=shutil.disk_usage(there).free,
    )


def pack(
    folder: pathlib.Path,
    dataset: LeRobotDataset,
    planned: Plan,
    *,
    num_workers: int = 2,
    skip_bad: bool = False,
    on_rows: Callable[[int], None] = lambda count: None,
) -> Manifest:
    """Packs what is missing.

    Args:
        folder: where the pack goes; made if need be.
        dataset: as planned.
        planned: from `plan`.
        num_workers: threads that decode.
        skip_bad: note frames that cannot be decoded and go on.
        on_rows: told how many more rows are done.

    Raises:
        UserError: no room on the disk; another process packs there; a frame is bad (the shards so far stay).
    """
    manifest = planned.manifest
    if planned.left_bytes > planned.free_bytes:
        raise UserError(
            f"{folder}: {format_bytes(planned.left_bytes)} are still to be written, but "
            f"{format_bytes(planned.free_bytes)} are free there. Choose a folder on another disk for --data.packed."
        )
    with _explained(folder), _locked(folder):
        manifest = _with_contents(dataset, manifest)
        write_manifest(folder, manifest)
        for left in folder.glob("shard-*.tmp"):
            left.unlink()
        with concurrent.futures.ThreadPoolExecutor(max(1, num_workers), "pack") as executor:
            for shard, crc in enumerate(manifest.shards):
                if crc is None:
                    crc, bad = _pack_shard(folder, dataset, manifest, shard, executor, skip_bad, on_rows)
                    shards = (*manifest.shards[:shard], crc, *manifest.shards[shard + 1 :])
                    rows = manifest.rows_of(shard)
                    kept = [entry for entry in manifest.bad if entry[0] not in rows]
                    manifest = dataclasses.replace(manifest, shards=shards, bad=tuple(sorted([*kept, *bad])))
                    write_manifest(folder, manifest)
        for path in sorted(folder.glob("shard-*.bin"))[len(manifest.shards) :]:
            path.unlink()  # of a larger pack that this one replaced
    changed, touched = changes(manifest, dataset)
    if changed or touched:
        raise UserError(
            f"{dataset.root} changed while it was packed: {', '.join((changed + touched)[:4])}. Pack it anew, with "
            "--overwrite."
        )
    return manifest


def verify(folder: pathlib.Path, manifest: Manifest, on_rows: Callable[[int], None] = lambda count: None) -> list[str]:
    """Reads every shard; one line for each whose pixels are not those that were written."""
    problems = []
    for shard, crc in enumerate(manifest.shards):
        found, path = 0, shard_path(folder, shard)
        try:
            with path.open("rb", buffering=0) as file:
                while block := file.read(_BLOCK_ROWS * manifest.record_bytes):
                    found = zlib.crc32(block, found)
                    on_rows(len(block) // manifest.record_bytes)
        except OSError as error:
            problems.append(f"{path}: {error}")
            continue
        if crc is not None and found != crc:
            problems.append(f"{path}: its pixels have changed since they were packed; delete it and pack again")
    return problems


def _present(folder: pathlib.Path, manifest: Manifest, shard: int) -> int | None:
    """The shard's checksum where its file is there in full."""
    path = shard_path(folder, shard)
    size = len(manifest.rows_of(shard)) * manifest.record_bytes
    return manifest.shards[shard] if path.is_file() and path.stat().st_size == size else None


def _with_contents(dataset: LeRobotDataset, manifest: Manifest) -> Manifest:
    """Fills in the contents' hashes."""
    files = {
        name: state if state.sha256 else dataclasses.replace(state, sha256=hash_file(dataset.root / name))
        for name, state in manifest.files.items()
    }
    return dataclasses.replace(manifest, files=files)


def _compare_contents(
    dataset: LeRobotDataset, manifest: Manifest, touched: Sequence[str]
) -> tuple[Manifest, list[str]]:
    """The manifest with the new times of files whose content is the same, and the files whose content is not."""
    files, now, rewritten = dict(manifest.files), file_states(dataset), []
    for name in touched:
        if hash_file(dataset.root / name) == files[name].sha256:
            files[name] = dataclasses.replace(now[name], sha256=files[name].sha256)
        else:
            rewritten.append(name)
    return dataclasses.replace(manifest, files=files), rewritten


def _pack_shard(
    folder: pathlib.Path,
    dataset: LeRobotDataset,
    manifest: Manifest,
    shard: int,
    executor: concurrent.futures.Executor,
    skip_bad: bool,
    on_rows: Callable[[int], None],
) -> tuple[int, list[tuple[int, str, str]]]:
    """Writes one shard aside, then puts it in place. Its checksum and bad frames."""
    rows, crc, bad = manifest.rows_of(shard), 0, []
    path = shard_path(folder, shard)
    aside = path.with_suffix(".tmp")
    blocks = [np.arange(rows.start, rows.stop)[i : i + _BLOCK_ROWS] for i in range(0, len(rows), _BLOCK_ROWS)]

    def decode(block: np.ndarray) -> tuple[np.ndarray, list[tuple[int, str, str]]]:
        return _decode(dataset, manifest.cameras, block, skip_bad)

    with aside.open("wb") as file:
        for pixels, faults in _ordered(executor, decode, blocks):
            data = pixels.reshape(-1).data
            file.write(data)
            crc = zlib.crc32(data, crc)
            bad += faults
            on_rows(len(pixels))
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    return crc, bad


def _ordered[A, R](executor: concurrent.futures.Executor, make: Callable[[A], R], items: Sequence[A]) -> Iterator[R]:
    """`map` that keeps only a few results in memory."""
    ahead = 2 * getattr(executor, "_max_workers", 2)
    futures = [executor.submit(make, item) for item in items[:ahead]]
    try:
        for i in range(len(items)):
            yield futures.pop(0).result()
            if i + ahead < len(items):
                futures.append(executor.submit(make, items[i + ahead]))
    finally:
        for future in futures:
            future.cancel()


def _decode(
    dataset: LeRobotDataset, cameras: Sequence[str], rows: np.ndarray, skip_bad: bool
) -> tuple[np.ndarray, list[tuple[int, str, str]]]:
    """rows x cameras x 224 x 224 x 3, and what could not be decoded."""
    pixels = np.zeros((len(rows), len(cameras), IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    bad = []
    for number, camera in enumerate(cameras):
        try:
            for i, frame in enumerate(dataset.frames(camera, rows)):
                pixels[i, number] = to_model_image(frame)
        except FrameError:
            if not skip_bad:
                raise
            for i in range(len(rows)):
                try:
                    pixels[i, number] = to_model_image(dataset.frames(camera, rows[i : i + 1])[0])
                except FrameError as error:
                    bad.append((error.row, camera, error.why))
    return pixels, bad


@contextlib.contextmanager
def _explained(folder: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        for left in folder.glob("shard-*.tmp"):
            left.unlink()
        raise UserError(
            f"{folder} cannot be written ({error}). Free space (df -h) or choose another folder for --data.packed; the "
            "shards that are whole stay, and the same command goes on."
        ) from error


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"Another process is packing into {folder}. Wait until it has ended.") from error
        yield
