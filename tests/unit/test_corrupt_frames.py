"""A damaged image in a real dataset: an error that names it, or left out, by threads and by processes alike."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openpi_accel.build.data import build_data
from openpi_accel.config.environment import Environment
from openpi_accel.config.flags import Acceleration
from openpi_accel.config.presets import get_preset
from openpi_accel.config.serialize import to_json
from openpi_accel.data.loader import BadSample
from openpi_accel.data.norm_stats import norm_stats_path, save_norm_stats
from openpi_accel.tools.pack_dataset import main as pack_main
from tests.data_fakes import unit_stats, write_tokenizer
from tests.lerobot_writer import CAMERA, write_dataset


def damage(root, row):
    """Cuts the image in this row of the first file short."""
    path = sorted(root.glob("data/**/*.parquet"))[0]
    table = pq.read_table(path)
    images = table.column(CAMERA).combine_chunks()
    images = images.chunk(0) if isinstance(images, pa.ChunkedArray) else images
    values = [
        value if i != row else value | {"bytes": value["bytes"][:40]} for i, value in enumerate(images.to_pylist())
    ]
    column = pa.array(values, images.type)
    pq.write_table(table.set_column(table.schema.get_field_index(CAMERA), CAMERA, column), path)


@pytest.fixture
def arguments(tmp_path):
    root = write_dataset(tmp_path / "dataset", version="v2.1", kind="image", lengths=(7, 5))
    damage(root, 2)
    config = get_preset("pi05_lerobot")
    assets = tmp_path / "assets"
    save_norm_stats(norm_stats_path(str(assets), config.name, config.asset_id), unit_stats(3, 2))
    return [
        f"--data.path={root}", f"--assets-base-dir={assets}", f"--data.tokenizer-path={write_tokenizer(tmp_path)}",
        "--batch-size=4", "--model.no-discrete-state-input", f"--data.cameras.base-0-rgb={CAMERA}",
    ]  # fmt: skip


def built(arguments, **switches):
    from openpi_accel.config.command_line import parse_train_config

    config = parse_train_config(["pi05_lerobot", *arguments], prog="t", description="t")
    assert to_json(config)
    return build_data(config, Acceleration(**switches), Environment.from_env({}))


@pytest.mark.parametrize("worker_cpu", [False, True])
def test_error_or_skip(arguments, worker_cpu):
    with built(arguments, worker_cpu=worker_cpu).loader() as loader:
        with pytest.raises(BadSample, match=r"episode 0, frame 2, camera .*not a whole image") as caught:
            for _ in range(3):
                next(loader)
        assert caught.value.row == 2
    with built([*arguments, "--data.on-corrupt=skip"], worker_cpu=worker_cpu).loader() as loader:
        batches = [next(loader) for _ in range(3)]
        assert list(loader.skipped) == [2]
    states = np.concatenate([batch.batch.observation.state[:, 2] for batch in batches])
    assert len(set(states.tolist())) == 11 and len(states) == 12  # one other row twice, for the bad one


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_file_that_vanishes_during_the_run_is_named(arguments, tmp_path, kind):
    root = write_dataset(tmp_path / kind / "dataset", version="v2.1", kind=kind, lengths=(7, 5))
    with built([*arguments, f"--data.path={root}"]).loader() as loader:
        gone = sorted(root.glob("videos/**/*.mp4" if kind == "video" else "data/**/*.parquet"))[1]
        gone.unlink()
        with pytest.raises(BadSample, match=rf"episode 1, frame \d, .*{gone.name}.* is missing.* [Ff]etch"):
            for _ in range(3):
                next(loader)


def test_a_pack_notes_the_frame_and_training_skips_it(arguments, tmp_path, capsys):
    packed = [*arguments, f"--data.packed={tmp_path / 'packed'}", "--data.on-corrupt=skip"]
    assert pack_main(["pi05_lerobot", *packed], {}) == 0
    assert "left out: row 2" in capsys.readouterr().out
    with built(packed).loader() as loader:
        for _ in range(3):
            next(loader)
        assert list(loader.skipped) == [2]
