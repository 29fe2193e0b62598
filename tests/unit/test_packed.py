"""The packed cache: equal pixels, never stale, never half."""

import json
import os
import pickle
import shutil

import jax
import numpy as np
import pytest

from openpi_accel.config.schema import DataConfig, ModelConfig
from openpi_accel.data import packing
from openpi_accel.data.lerobot.dataset import open_dataset
from openpi_accel.data.lerobot.frames import FrameError
from openpi_accel.data.mapping import resolve_mapping
from openpi_accel.data.packed import PackedFrames, read_manifest, shard_path
from openpi_accel.data.packing import pack, plan, verify
from openpi_accel.data.pipeline import BatchSource
from openpi_accel.data.tokenizer import PromptTokenizer
from openpi_accel.errors import UserError
from openpi_accel.tools.inspect_dataset import main as inspect_main
from openpi_accel.tools.pack_dataset import main
from tests.data_fakes import unit_stats, write_tokenizer
from tests.lerobot_writer import CAMERA, write_dataset

WRIST = "observation.images.wrist"
SHARD_BYTES = 8 * 150_528  # small shards, so that there are several


@pytest.fixture
def root(tmp_path):
    return write_dataset(tmp_path / "dataset", version="v2.1", kind="image", lengths=(7, 5, 8))


def packed(folder, dataset, **options):
    cameras = list(dataset.cameras)
    return pack(folder, dataset, plan(folder, dataset, cameras, shard_bytes=SHARD_BYTES, **options))


def opened(folder, dataset, cameras=(CAMERA,)):
    return PackedFrames(folder, dataset, cameras, "pack-command")


@pytest.mark.shared
@pytest.mark.parametrize("name", ["libero_shaped_v20", "v30_converted_video"])
def test_batches_are_equal_to_decoded_ones(name, shared, tmp_path):
    dataset = open_dataset(shared / "datasets" / name)
    data, model = DataConfig(repo_id="x"), ModelConfig(max_token_len=200, discrete_state_input=False)
    mapping = resolve_mapping(data, dataset)
    pack(tmp_path / "p", dataset, plan(tmp_path / "p", dataset, list(dataset.cameras), shard_bytes=9 << 20))
    parts = {
        "dataset": dataset, "mapping": mapping, "model": model, "data": data,
        "norm_stats": unit_stats(mapping.state_dim, mapping.action_dim),
        "tokenizer": PromptTokenizer(write_tokenizer(tmp_path), max_token_len=200, vocab_size=512),
    }  # fmt: skip
    rows = np.random.default_rng(0).permutation(dataset.num_frames)[:24]
    decoded = BatchSource(**parts).load_batch(rows)
    read = BatchSource(**parts, packed=opened(tmp_path / "p", dataset, mapping.cameras.as_dict().values()))
    for source in (read, pickle.loads(pickle.dumps(read))):
        for left, right in zip(jax.tree.leaves(source.load_batch(rows)), jax.tree.leaves(decoded), strict=True):
            np.testing.assert_array_equal(left, right)


def test_reads_any_subset_of_the_cameras(tmp_path):
    root = write_dataset(tmp_path / "dataset", version="v2.1", kind="image", lengths=(7, 5))
    dataset = open_dataset(root)
    folder = tmp_path / "p"
    cameras = (CAMERA, "second", "third")
    frames = np.random.default_rng(0).integers(0, 256, (12, 3, 224, 224, 3), np.uint8)
    manifest = plan(folder, dataset, cameras, shard_bytes=5 * 3 * 150_528).manifest
    assert [len(manifest.rows_of(i)) for i in range(len(manifest.shards))] == [5, 5, 2]

    def decode(dataset, cameras, rows, skip_bad):
        return frames[rows], []

    original, packing._decode = packing._decode, decode
    try:
        pack(folder, dataset, plan(folder, dataset, cameras, shard_bytes=5 * 3 * 150_528))
    finally:
        packing._decode = original
    reader, rows = opened(folder, dataset), np.array([11, 0, 5, 4, 11])
    for chosen in ((0,), (2,), (1, 2), (0, 2), (2, 0, 1)):
        out = {cameras[i]: np.zeros((5, 224, 224, 3), np.uint8) for i in chosen}
        reader.read(rows, out)
        for i in chosen:
            np.testing.assert_array_equal(out[cameras[i]], frames[rows, i])


def test_goes_on_after_a_stop_and_writes_what_is_missing_only(root, tmp_path, monkeypatch):
    dataset, folder, calls = open_dataset(root), tmp_path / "p", []
    original = packing._pack_shard

    def stop_after_one(*arguments):
        calls.append(arguments[3])
        if len(calls) == 2:
            (folder / "shard-00001.tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(packing, "_pack_shard", stop_after_one)
    with pytest.raises(KeyboardInterrupt):
        packed(folder, dataset)
    with pytest.raises(UserError, match=r"has 1 of 3 shards\. Go on with: pack-command"):
        opened(folder, dataset)
    packed(folder, dataset)
    assert calls == [0, 1, 1, 2]
    assert not list(folder.glob("*.tmp")) and opened(folder, dataset).cameras == (CAMERA,)
    assert verify(folder, read_manifest(folder)) == []


def test_a_changed_dataset_is_refused(root, tmp_path):
    folder = tmp_path / "p"
    packed(folder, open_dataset(root))
    file = sorted(root.rglob("*.parquet"))[1]
    content = bytearray(file.read_bytes())
    content[200] ^= 1  # same length
    file.write_bytes(content)
    with pytest.raises(UserError, match=file.name):
        opened(folder, open_dataset(root))
    with pytest.raises(UserError, match="holds a pack of something else"):
        packed(folder, open_dataset(root))
    write_dataset(tmp_path / "other", version="v2.1", kind="image", lengths=(7, 5, 9))
    with pytest.raises(UserError, match="is not what was packed"):
        opened(folder, open_dataset(tmp_path / "other"))
    shutil.copytree(tmp_path / "other", root, dirs_exist_ok=True)
    packed(folder, open_dataset(root), overwrite=True)
    assert opened(folder, open_dataset(root)).cameras == (CAMERA,)


def test_a_copied_dataset_keeps_its_pack_once_its_contents_are_compared(root, tmp_path):
    folder = tmp_path / "p"
    packed(folder, open_dataset(root))
    before = shard_path(folder, 0).stat().st_mtime_ns
    for file in root.rglob("*.parquet"):
        os.utime(file, (1, 1))
    with pytest.raises(UserError, match="only copied.*pack-command$"):
        opened(folder, open_dataset(root))
    packed(folder, open_dataset(root))
    opened(folder, open_dataset(root))
    assert shard_path(folder, 0).stat().st_mtime_ns == before


def test_a_dataset_that_changes_while_it_is_packed(root, tmp_path, monkeypatch):
    dataset, original = open_dataset(root), packing._pack_shard

    def touch(*arguments):
        os.utime(sorted(root.rglob("*.parquet"))[0], (1, 1))
        return original(*arguments)

    monkeypatch.setattr(packing, "_pack_shard", touch)
    with pytest.raises(UserError, match="changed while it was packed"):
        packed(tmp_path / "p", dataset)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: shard_path(folder, 1).unlink(), r"shard-00001\.bin is missing or cut short"),
        (lambda folder: os.truncate(shard_path(folder, 0), 1000), r"shard-00000\.bin is missing or cut short"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "cannot be used"),
        (lambda folder: (folder / "manifest.json").unlink(), "nothing is packed"),
    ],
)
def test_a_damaged_pack_is_refused(root, tmp_path, harm, message):
    dataset = open_dataset(root)
    packed(tmp_path / "p", dataset)
    harm(tmp_path / "p")
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "p", dataset)


def test_a_missing_camera_a_full_disk_and_a_strange_folder(root, tmp_path, monkeypatch):
    dataset, folder = open_dataset(root), tmp_path / "p"
    packed(folder, dataset)
    with pytest.raises(UserError, match=f"not {WRIST}"):
        opened(folder, dataset, (CAMERA, WRIST))
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.tex").write_text("dear")
    with pytest.raises(UserError, match="is not empty"):
        plan(strange, dataset, [CAMERA])
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda path: os.times() and type("U", (), {"free": 10})())
    with pytest.raises(UserError, match="are free there"):
        packed(tmp_path / "q", dataset)
    assert not (tmp_path / "q").exists()


def test_bad_frames_are_an_error_or_noted(root, tmp_path):
    dataset = open_dataset(root)
    original = dataset.frames

    def frames(camera, rows):
        if 9 in rows:
            raise dataset.frame_error(camera, 9, "it is damaged")
        return original(camera, rows)

    dataset.frames = frames
    with pytest.raises(FrameError, match="episode 1, frame 2"):
        packed(tmp_path / "p", dataset)
    manifest = pack(
        tmp_path / "p", dataset, plan(tmp_path / "p", dataset, [CAMERA], shard_bytes=SHARD_BYTES), skip_bad=True
    )
    assert manifest.bad == ((9, CAMERA, "it is damaged"),)
    reader, out = opened(tmp_path / "p", dataset), {CAMERA: np.zeros((2, 224, 224, 3), np.uint8)}
    reader.read(np.array([8, 10]), out)
    with pytest.raises(FrameError, match="episode 1, frame 2.*it is damaged") as caught:
        reader.read(np.array([8, 9]), out)
    assert caught.value.row == 9


def test_the_script(root, tmp_path, capsys):
    folder = tmp_path / "p"
    arguments = ["pi05_lerobot", f"--data.path={root}", f"--data.packed={folder}"]
    assert main([*arguments, "--dry-run"], {}) == 0
    assert not folder.exists() and "make 2.9 MiB in 1 shards" in capsys.readouterr().err
    assert main(arguments, {}) == 0
    assert main([*arguments, "--check"], {}) == 0
    with shard_path(folder, 0).open("r+b") as file:
        file.write(b"x")
    assert main([*arguments, "--check"], {}) == 1
    assert "its pixels have changed" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--data\.packed is missing"):
        main(["pi05_lerobot", f"--data.path={root}"], {})


def test_inspect_tells_about_a_pack(root, tmp_path, capsys):
    folder = tmp_path / "p"
    with pytest.raises(UserError, match="Nothing is packed"):
        inspect_main([str(root), f"--packed={folder}"], {})
    packed(folder, open_dataset(root))
    assert inspect_main([str(root), f"--packed={folder}"], {}) == 0
    assert "3 of 3 shards, 0 bad frames; complete and of this dataset" in capsys.readouterr().out
    os.utime(sorted(root.rglob("*.parquet"))[0], (1, 1))
    assert inspect_main([str(root), f"--packed={folder}", "--json"], {}) == 1
    assert "is not what was packed" in json.loads(capsys.readouterr().out)["packed"]["problem"]


def test_a_disk_that_fills_up_leaves_whole_shards(root, tmp_path, monkeypatch):
    dataset, calls = open_dataset(root), []

    def full(file):
        calls.append(file)
        if len(calls) == 4:  # the manifest, a shard, the manifest, then the second shard
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"No space left.*the same command goes on"):
        packed(tmp_path / "p", dataset)
    assert [path.name for path in sorted((tmp_path / "p").glob("shard*"))] == ["shard-00000.bin"]
    assert read_manifest(tmp_path / "p").shards[1:] == (None, None)
