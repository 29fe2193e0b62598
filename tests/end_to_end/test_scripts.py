"""Every script starts from a clone: from any folder, without PYTHONPATH; where packages are missing it says so."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.conftest import COMPILING, REPO

SCRIPTS = sorted(path.name for path in (REPO / "scripts").glob("*.py") if path.name != "_entry.py")
# These have no --help; with nothing to do or to look at they end by themselves.
ARGUMENTS = {"check_nodes.py": [], "train_demo_tokenizer.py": ["tokenizer.model"]}
MINUTES_S = 300  # a busy machine


def start(script: str, *words: str, folder: pathlib.Path, python: tuple[str, ...] = (sys.executable,), **env: str):
    return subprocess.run(
        [*python, str(REPO / "scripts" / script), *words],
        env={"PATH": os.environ["PATH"], "HOME": str(folder)} | COMPILING | env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=MINUTES_S,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_start_from_anywhere_without_pythonpath(script, tmp_path):
    done = start(script, *ARGUMENTS.get(script, ["--help"]), folder=tmp_path, WORLD_SIZE="1")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "missing_packages.py"])
def test_a_python_without_the_packages_gets_a_message(script, tmp_path):
    # -S leaves site-packages out: a real Python that has nothing.
    done = start(script, "--help", folder=tmp_path, python=(sys.executable, "-S"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"source {REPO / '.venv/bin/activate'}" in done.stderr
