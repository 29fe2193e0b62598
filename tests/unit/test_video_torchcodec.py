"""torchcodec as the decoder: chosen, refused where it is not there, and asked for the right frames."""

import pathlib
import sys
import types

import numpy as np
import pytest

from openpi_accel.data.lerobot.dataset import open_dataset
from openpi_accel.data.lerobot.frames import FrameError
from openpi_accel.data.video import VideoReader
from openpi_accel.data.video_torchcodec import TorchcodecReader, choose_reader
from openpi_accel.errors import UserError
from tests.lerobot_writer import CAMERA, number_of, write_dataset, write_video


class Decoder:
    """Has torchcodec's interface, as far as it is used; PyAV does the work. Frame 7 is damaged."""

    extra_frames = 0

    def __init__(self, source: str, *, dimension_order: str, num_ffmpeg_threads: int, seek_mode: str) -> None:
        assert (dimension_order, num_ffmpeg_threads, seek_mode) == ("NHWC", 1, "exact")
        self._reader = VideoReader(pathlib.Path(source))
        self.metadata = types.SimpleNamespace(num_frames=self._reader.table.num_frames + self.extra_frames)

    def get_frames_at(self, indices: list[int]) -> types.SimpleNamespace:
        assert isinstance(indices, list) and all(isinstance(index, int) for index in indices)
        if 7 in indices:
            raise RuntimeError("could not decode\nmore")
        frames = np.stack(self._reader.frames(indices))
        return types.SimpleNamespace(data=types.SimpleNamespace(numpy=lambda: frames))


@pytest.fixture
def torchcodec(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchcodec", types.ModuleType("torchcodec"))
    decoders = types.ModuleType("torchcodec.decoders")
    decoders.VideoDecoder = type("VideoDecoder", (Decoder,), {})
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", decoders)
    return decoders.VideoDecoder


@pytest.mark.parametrize("missing", [None, RuntimeError("Could not load libtorchcodec\nFFmpeg version 8: …")])
def test_without_it(monkeypatch, missing):
    if missing is None:
        monkeypatch.setitem(sys.modules, "torchcodec", None)
    else:

        def fail(name):
            raise missing

        monkeypatch.setattr("importlib.import_module", fail)
    assert choose_reader("auto") is VideoReader and choose_reader("pyav") is VideoReader
    with pytest.raises(
        UserError, match=r"cannot be imported \((No module named|Could not load libtorchcodec)"
    ) as error:
        choose_reader("torchcodec")
    assert "--data.video-decoder pyav" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.usefixtures("torchcodec")
def test_a_dataset_is_read_by_it(tmp_path):
    root = write_dataset(tmp_path / "d", version="v3.0", kind="video", lengths=(5, 12))
    ours, theirs = open_dataset(root), open_dataset(root, "torchcodec")
    assert isinstance(theirs._frames._videos._open_reader(next(root.glob("videos/*/*/*.mp4")), None), TorchcodecReader)
    rows = np.array([3, 0, 11, 3, 16])
    for one, other in zip(ours.frames(CAMERA, rows), theirs.frames(CAMERA, rows), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(FrameError, match=r"episode 1, frame 2, camera .*\(could not decode\)"):
        theirs.frames(CAMERA, np.array([6, 7, 8]))
    rebuild, arguments = theirs.__reduce__()  # what a worker process opens
    assert rebuild(*arguments)._video_decoder == "torchcodec"


def test_what_it_cannot_read(tmp_path, torchcodec):
    write_video(tmp_path / "a.mp4", range(20))
    reader = TorchcodecReader(tmp_path / "a.mp4")
    assert [number_of(frame) for frame in reader.frames([4, 2])] == [4, 2] and reader.frames([]) == []
    with pytest.raises(UserError, match="there is no frame 20"):
        reader.frames([20])
    torchcodec.extra_frames = 1
    with pytest.raises(UserError, match="torchcodec counts 21 frames and the file has 20"):
        TorchcodecReader(tmp_path / "a.mp4")
