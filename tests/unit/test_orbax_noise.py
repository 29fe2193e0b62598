"""A damaged checkpoint is one message: whatever file of it is cut or gone, and whichever way it is read."""

import pathlib
import subprocess
import sys

from openpi_accel.orbax_noise import is_stray
from tests.conftest import REPO
from tests.unit import toy

# In a process of its own, as echoes come from threads and from the garbage collector, also at the very end.
READ_DAMAGED = """
import gc, pathlib, shutil, sys
import jax
from openpi_accel import cli
from openpi_accel.models.weights import load_base_params
from openpi_accel.parallel.mesh import make_mesh
from openpi_accel.train.checkpoint import CheckpointStore
from openpi_accel.train.start import abstract_state
from tests.unit import toy

good, number = pathlib.Path(sys.argv[1]), 0
state = abstract_state(toy.init_params, toy.TX, toy.everything, 0.9, make_mesh(1, jax.devices()[:1]))
for item in ("params", "train_state", "resume"):
    for file in sorted(path for path in (good / "2" / item).rglob("*") if path.is_file()):
        for how in ("cut", "gone"):
            number += 1
            bad = good.with_name(f"bad_{number}")
            shutil.copytree(good, bad)
            path = bad / file.relative_to(good)
            if how == "cut":
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            else:
                path.unlink()

            def resume() -> None:
                CheckpointStore(bad, settings={"ema_decay": 0.9}).restore(2, state)

            def load() -> None:
                load_base_params(bad / "2" / "params", state.params, lambda name: False)

            for read in (resume, load) if item == "params" else (resume,):
                try:
                    cli.run(read)
                except SystemExit as end:
                    print(f"{end.code} {how} {file.relative_to(good)}", flush=True)
                gc.collect()
"""


def test_every_damaged_file_is_one_message(tmp_path: pathlib.Path) -> None:
    toy.train(tmp_path / "good", 3)
    done = subprocess.run(
        [sys.executable, "-c", READ_DAMAGED, str(tmp_path / "good")],
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    ends = done.stdout.splitlines()
    codes = {end.split()[0] for end in ends}
    assert codes == {"0", "2"}  # some files are not read at all
    messages = done.stderr.splitlines()
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    assert sum(line.startswith("error: ") for line in messages) == sum(end.startswith("2 ") for end in ends)
    for file in ("params/manifest.ocdbt", "train_state/_METADATA", "resume/resume.json"):
        assert f"2 cut 2/{file}" in ends


def test_other_reports_are_kept() -> None:
    async def ours() -> None: ...

    coroutine = ours()
    assert not is_stray(ValueError("x"), coroutine) and not is_stray(RuntimeError("x"), None)
    assert is_stray(RuntimeError("Event loop is closed"), None)
    coroutine.close()
