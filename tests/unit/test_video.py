"""Exact frames by number: B-frames, distant key frames, 29.97 fps, a late first time stamp, threads, damage."""

import fractions
import pathlib
import threading

import av
import numpy as np
import pytest

from openpi_accel.data.video import VideoPool, VideoReader, read_frame_table
from openpi_accel.errors import UserError
from tests.lerobot_writer import number_of, write_video

NTSC = fractions.Fraction(30000, 1001)
VARIANTS = {
    "key frame every 2": dict(gop=2),
    "key frame every 250": dict(gop=250, rate=NTSC),
    "b-frames": dict(gop=12, b_frames=3, rate=30),
    "b-frames between close key frames": dict(gop=4, b_frames=3, rate=NTSC),
    "open groups": dict(gop=8, b_frames=3, open_gop=True),
    "late start": dict(gop=10, first_pts=37, rate=25),
}


@pytest.fixture(scope="module", params=VARIANTS)
def video(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("video") / "a.mp4"
    write_video(path, range(1000, 1300), **VARIANTS[request.param])
    return path


def test_every_frame_in_order_backwards_and_at_random(video: pathlib.Path) -> None:
    reader = VideoReader(video)
    assert reader.table.num_frames == 300
    assert [number_of(frame) for frame in reader.frames(range(300))] == list(range(1000, 1300))
    for order in (np.arange(299, -1, -7), np.random.default_rng(0).permutation(300)[:60]):
        for index in order.tolist():
            assert number_of(reader.frames([index])[0]) == 1000 + index
    assert [number_of(frame) for frame in reader.frames([299, 0, 299, 5])] == [1299, 1000, 1299, 1005]
    reader.close()


def test_ascending_reads_between_distant_key_frames_decode_each_frame_once(tmp_path: pathlib.Path) -> None:
    write_video(tmp_path / "a.mp4", range(200), gop=250)
    reader = VideoReader(tmp_path / "a.mp4")
    seeks = []
    seek = reader._seek
    reader._seek = lambda key: (seeks.append(key), seek(key))[1]  # type: ignore[method-assign,func-returns-value]
    assert [number_of(f) for f in reader.frames([3, 50, 51, 120, 199])] == [3, 50, 51, 120, 199]
    assert len(seeks) == 1
    reader.close()


def test_a_nearer_key_frame_is_worth_a_seek(tmp_path: pathlib.Path) -> None:
    write_video(tmp_path / "a.mp4", range(200), gop=5)
    reader = VideoReader(tmp_path / "a.mp4")
    seeks = []
    seek = reader._seek
    reader._seek = lambda key: (seeks.append(key), seek(key))[1]  # type: ignore[method-assign,func-returns-value]
    assert [number_of(f) for f in reader.frames([0, 150, 151])] == [0, 150, 151]
    assert len(seeks) == 2
    reader.close()


def test_times_count_from_the_first_frame(tmp_path: pathlib.Path) -> None:
    write_video(tmp_path / "a.mp4", range(60), rate=NTSC, first_pts=9)
    table = read_frame_table(tmp_path / "a.mp4")
    np.testing.assert_allclose(table.times_s, np.arange(60) * 1001 / 30000, atol=1e-4)
    assert table.codec == "h264"


def test_threads_share_a_pool(tmp_path: pathlib.Path) -> None:
    paths = [tmp_path / f"{i}.mp4" for i in range(6)]
    for i, path in enumerate(paths):
        write_video(path, range(100 * i, 100 * i + 30), gop=10)
    pool, wrong = VideoPool(max_idle=3), []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            i, index = int(rng.integers(6)), int(rng.integers(30))
            if number_of(pool.frames(paths[i], [index])[0]) != 100 * i + index:
                wrong.append((i, index))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(pool._idle) == 3
    pool.close()
    assert not pool._idle


def test_frame_tables_are_bounded(tmp_path: pathlib.Path) -> None:
    pool = VideoPool(max_table_bytes=2 * 30 * 16)
    for i in range(5):
        write_video(tmp_path / f"{i}.mp4", range(30))
        assert number_of(pool.frames(tmp_path / f"{i}.mp4", [7])[0]) == 7
    assert 1 <= len(pool._tables) <= 3
    assert pool._table_bytes <= 2 * 30 * 16
    pool.close()


def test_no_such_frame(tmp_path: pathlib.Path) -> None:
    write_video(tmp_path / "a.mp4", range(5))
    for index in (-1, 5):
        with pytest.raises(UserError, match=rf"a\.mp4: there is no frame {index}; the video has 5 frames"):
            VideoReader(tmp_path / "a.mp4").frames([index])


def test_missing_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"a\.mp4: this video file is missing"):
        VideoReader(tmp_path / "a.mp4")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_truncated_file(tmp_path: pathlib.Path, share: float) -> None:
    path = tmp_path / "a.mp4"
    write_video(path, range(50))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match=r"a\.mp4.*(cut short|damaged)"):
        VideoPool().frames(path, [0])


def test_truncated_file_whose_header_comes_first(tmp_path: pathlib.Path) -> None:
    write_video(tmp_path / "a.mp4", range(50))
    with (
        av.open(str(tmp_path / "a.mp4")) as source,
        av.open(str(tmp_path / "b.mp4"), "w", options={"movflags": "faststart"}) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    data = (tmp_path / "b.mp4").read_bytes()
    assert VideoPool().table(tmp_path / "b.mp4").num_frames == 50
    (tmp_path / "b.mp4").write_bytes(data[: int(len(data) * 0.8)])
    with pytest.raises(UserError, match=r"b\.mp4.*(cut short|damaged)"):
        VideoPool().frames(tmp_path / "b.mp4", [0])


@pytest.mark.parametrize("damage", ["zeros", "flipped bits"])
def test_damage_in_the_middle_spoils_only_its_group(tmp_path: pathlib.Path, damage: str) -> None:
    path = tmp_path / "a.mp4"
    write_video(path, range(40), gop=10)
    with av.open(str(path)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    position, size = packets[20]
    data = bytearray(path.read_bytes())
    for i in range(position + size // 3, position + size * 2 // 3):
        data[i] = 0 if damage == "zeros" else data[i] ^ 0x5A
    path.write_bytes(data)
    pool = VideoPool()
    for index in (0, 19, 30, 39):
        assert number_of(pool.frames(path, [index])[0]) == index
    for index in (20, 25, 29):
        with pytest.raises(UserError, match=rf"a\.mp4, frame {index}: the video (cannot be read|is damaged)"):
            pool.frames(path, [index])


def test_no_video_in_the_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"this is text" * 100)
    with pytest.raises(UserError, match=r"a\.mp4.*damaged"):
        VideoReader(tmp_path / "a.mp4")
