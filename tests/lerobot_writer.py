"""Writes small LeRobot datasets of every layout, whose frames carry their own number as a bar code."""

import fractions
import io
import json
import pathlib
from collections.abc import Sequence

import av
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq

HEIGHT, WIDTH, _BITS = 16, 128, 16
CAMERA = "observation.images.base"


def numbered_frame(number: int) -> np.ndarray:
    """uint8 H W 3: 16 black or white bars, the number's bits; wide enough to survive lossy coding."""
    bits = (number >> np.arange(_BITS)) & 1
    return np.broadcast_to(np.repeat(bits * 255, WIDTH // _BITS)[None, :, None], (HEIGHT, WIDTH, 3)).astype(np.uint8)


def number_of(frame: np.ndarray) -> int:
    """The number that a frame carries."""
    assert frame.shape == (HEIGHT, WIDTH, 3) and frame.dtype == np.uint8
    bars = frame.astype(float).mean(axis=(0, 2)).reshape(_BITS, -1).mean(axis=1)
    return int(((bars > 127).astype(int) << np.arange(_BITS)).sum())


def png(image: np.ndarray) -> bytes:
    """Encoded by Pillow."""
    data = io.BytesIO()
    PIL.Image.fromarray(image).save(data, "png")
    return data.getvalue()


def write_video(
    path: pathlib.Path,
    numbers: Sequence[int],
    *,
    rate: fractions.Fraction | int = 10,
    gop: int = 2,
    b_frames: int = 0,
    first_pts: int = 0,
    open_gop: bool = False,
) -> None:
    """H.264 in mp4, one numbered frame after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.gop_size = gop
        stream.options = {"bf": str(b_frames), "preset": "ultrafast", "sc_threshold": "0", "b_strategy": "0"}
        if open_gop:
            stream.options |= {"x264-params": "open-gop=1:bframes=3:b-pyramid=2"}
        for i, number in enumerate(numbers):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number), format="rgb24")
            frame.pts, frame.time_base = first_pts + i, 1 / fractions.Fraction(rate)
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def write_dataset(
    root: pathlib.Path,
    *,
    version: str = "v2.1",
    lengths: Sequence[int] = (5, 3),
    kind: str = "image",
    fps: float = 10,
    tasks: Sequence[str] = ("stack the cups", "open the drawer"),
    fixed_size: bool = True,
    task_column: str = "task",
    physical_order: Sequence[int] | None = None,
    episodes_per_file: int = 2,
    first_index: int = 0,
    rate: fractions.Fraction | int | None = None,
    gop: int = 2,
    gap: int = 0,
) -> pathlib.Path:
    """One camera, state (episode, frame, row), action (row, -row); the frame's number is the row.

    Args:
        root: folder to write.
        version: v2.0, v2.1 or v3.0.
        lengths: frames of each episode.
        kind: image or video.
        fps: as declared; rate is what the video has.
        tasks: episode e has task e modulo their number.
        fixed_size: numeric columns as fixed_size_list, else list.
        task_column: v3.0's name of the text column.
        physical_order: v3.0's order of the episodes in the files.
        episodes_per_file: v3.0.
        first_index: value of the index column in row 0.
        rate, gop: of the videos.
        gap: frames of no episode before each clip of v3.0.
    """
    order = list(physical_order if physical_order is not None else range(len(lengths)))
    first_row = dict(zip(order, np.cumsum([0, *(lengths[e] for e in order)])[:-1].tolist(), strict=True))
    rate = rate if rate is not None else fractions.Fraction(fps)
    shape = [HEIGHT, WIDTH, 3]
    features: dict[str, dict] = {
        CAMERA: {"dtype": kind, "shape": shape, "names": ["height", "width", "channels"]},
        "observation.state": {"dtype": "float32", "shape": [3], "names": ["e", "f", "r"]},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        **{k: {"dtype": "int64", "shape": [1], "names": None} for k in _INTEGERS},
    }
    if kind == "video":
        features[CAMERA]["info"] = {"video.codec": "h264", "video.fps": fps}
    v3 = version == "v3.0"
    info = {
        "codebase_version": version,
        "fps": fps,
        "features": features,
        "total_episodes": len(lengths),
        "total_frames": sum(lengths),
        "chunks_size": 1000,
        "data_path": _DATA_V3 if v3 else _DATA_V2,
        "video_path": None if kind == "image" else _VIDEO_V3 if v3 else _VIDEO_V2,
        "robot_type": "test",
    }
    (root / "meta").mkdir(parents=True)
    (root / "meta" / "info.json").write_text(json.dumps(info))
    (root / "README.md").write_text("an extra file")
    tables = {e: _table(e, lengths[e], first_row[e], first_index, kind, fps, len(tasks), fixed_size) for e in order}
    numbers = {e: list(range(first_row[e], first_row[e] + lengths[e])) for e in order}
    if not v3:
        for e in order:
            _write(root / _DATA_V2.format(episode_chunk=0, episode_index=e), tables[e])
            if kind == "video":
                write_video(
                    root / _VIDEO_V2.format(episode_chunk=0, episode_index=e, video_key=CAMERA),
                    numbers[e], rate=rate, gop=gop,
                )  # fmt: skip
        lines = [{"episode_index": e, "tasks": [tasks[e % len(tasks)]], "length": n} for e, n in enumerate(lengths)]
        (root / "meta" / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        texts = [{"task_index": i, "task": text} for i, text in enumerate(tasks)]
        (root / "meta" / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
        return root

    entries = []
    for file, at in enumerate(range(0, len(order), episodes_per_file)):
        here = order[at : at + episodes_per_file]
        _write(root / _DATA_V3.format(chunk_index=0, file_index=file), pa.concat_tables([tables[e] for e in here]))
        for e in here:
            entry = {
                "episode_index": e,
                "tasks": [tasks[e % len(tasks)]],
                "length": lengths[e],
                "data/chunk_index": 0,
                "data/file_index": file,
                "dataset_from_index": first_row[e],
                "dataset_to_index": first_row[e] + lengths[e],
                "stats/action/min": [0.0, 0.0],
            }
            entries.append(entry)
    if kind == "video":
        shown: list[int] = []
        for entry in entries:
            shown += [_NO_EPISODE] * gap
            entry[f"videos/{CAMERA}/chunk_index"] = entry[f"videos/{CAMERA}/file_index"] = 0
            entry[f"videos/{CAMERA}/from_timestamp"] = float(len(shown) / rate)
            shown += numbers[entry["episode_index"]]
            entry[f"videos/{CAMERA}/to_timestamp"] = float(len(shown) / rate)
        write_video(root / _VIDEO_V3.format(video_key=CAMERA, chunk_index=0, file_index=0), shown, rate=rate, gop=gop)
    entries.sort(key=lambda entry: entry["episode_index"])
    _write(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet", pa.Table.from_pylist(entries))
    texts_table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), task_column: list(tasks)})
    _write(root / "meta" / "tasks.parquet", texts_table)
    return root


_INTEGERS = ("frame_index", "episode_index", "index", "task_index")
_DATA_V2 = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
_VIDEO_V2 = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
_DATA_V3 = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO_V3 = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_NO_EPISODE = 0xFFFF


def _table(
    episode: int, length: int, row: int, first_index: int, kind: str, fps: float, num_tasks: int, fixed_size: bool
) -> pa.Table:
    frames = np.arange(length)
    rows = row + frames
    state = np.stack([np.full(length, episode), frames, rows], axis=1).astype(np.float32)
    action = np.stack([rows, -rows], axis=1).astype(np.float32)
    columns = {
        "observation.state": _lists(state, fixed_size),
        "action": _lists(action, fixed_size),
        "timestamp": pa.array((frames / fps).astype(np.float32)),
        "frame_index": pa.array(frames),
        "episode_index": pa.array(np.full(length, episode)),
        "index": pa.array(rows + first_index),
        "task_index": pa.array(np.full(length, episode % num_tasks)),
        "subtask": pa.array([None] * length, pa.list_(pa.string())),
    }
    if kind == "image":
        images = [{"bytes": png(numbered_frame(r)), "path": f"frame-{r:06d}.png"} for r in rows.tolist()]
        columns[CAMERA] = pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    return pa.table(columns)


def _lists(values: np.ndarray, fixed_size: bool) -> pa.Array:
    flat = pa.array(values.reshape(-1))
    if fixed_size:
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return pa.ListArray.from_arrays(pa.array(np.arange(len(values) + 1) * values.shape[1], pa.int32()), flat)


def _write(path: pathlib.Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=3)
