"""The data benchmark measures every decoder, reader and kind of worker, and each line can be read by a machine."""

import json

import pytest

from openpi_accel.errors import UserError
from openpi_accel.tools.bench_data import main
from openpi_accel.tools.pack_dataset import main as pack_main
from tests.data_fakes import write_tokenizer
from tests.lerobot_writer import CAMERA, write_dataset


def arguments(tmp_path, kind):
    root = write_dataset(tmp_path / "dataset", version="v3.0", kind=kind, lengths=(9, 7))
    return [
        "pi05_lerobot", f"--data.path={root}", f"--data.tokenizer-path={write_tokenizer(tmp_path)}", "--batch-size=4",
        f"--data.cameras.base-0-rgb={CAMERA}", "--model.no-discrete-state-input",
    ]  # fmt: skip


def test_images_and_their_pack(tmp_path, capsys):
    common = [*arguments(tmp_path, "image"), f"--data.packed={tmp_path / 'packed'}"]
    with pytest.raises(UserError, match=r"Pack it with: python scripts/pack_dataset\.py pi05_lerobot"):
        main(common, {})
    assert pack_main(common, {}) == 0
    capsys.readouterr()
    assert main([*common, "--workers=1", "--batches=1", "--json"], {}) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(line["what"], line["reader"], line["workers"]) for line in lines} == {
        (f"decode {CAMERA}", "imagecodecs", ""), (f"decode {CAMERA}", "Pillow", ""),
        (f"decode {CAMERA}", "parquet page", ""), (f"decode {CAMERA}", "resize", ""),
        ("batch", "files", ""), ("batch", "packed", ""),
        ("load", "files", "1 threads"), ("load", "packed", "1 threads"),
        ("load", "files", "1 processes"), ("load", "packed", "1 processes"),
    }  # fmt: skip
    assert all(line["per_s"] > 0 for line in lines)


def test_video_as_a_table(tmp_path, capsys):
    assert main([*arguments(tmp_path, "video"), "--workers=", "--batches=1"], {}) == 0
    out = capsys.readouterr().out
    assert "PyAV" in out and "peak memory" in out
    with pytest.raises(UserError, match="no list of numbers"):
        main([*arguments(tmp_path / "b", "image"), "--workers=many"], {})
