"""run_multinode.sh on two nodes that share nothing but a folder: own network, addresses and host names each."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.conftest import COMPILING, REPO, as_two_nodes
from tests.distributed.test_devices import assert_close, losses
from tests.unit import toy

# Checks the node as ever; in place of pi0.5's training it trains a toy, with the cluster that the launcher handed on.
STAND_IN = f"""#!{shutil.which("bash")}
case "$1" in
    */train.py) exec {sys.executable} -m tests.distributed.worker $WORKER ;;
    */missing_packages.py) exit 0 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.mark.namespaces
def test_two_nodes_with_their_own_addresses_train_as_one(tmp_path: pathlib.Path) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    command = [
        *as_two_nodes(),
        *("bash", str(REPO / "tests" / "end_to_end" / "two_nodes.sh"), str(tmp_path / "hosts")),
        *("bash", "run_multinode.sh", "pi05_libero"),
    ]
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "EXP_NAME": "two", **COMPILING}
    env |= {
        "OPENPI_PYTHON": str(python),
        "OPENPI_DOCTOR": "0",
        "WORKER": f"{tmp_path / 'run'} 3 --devices 2 --expect-devices 4 --fsdp 2",
    }
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=600)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    for rank in range(2):
        assert f"node {rank} of 2, coordinator 10.77.0.1:29500" in output
    toy.train(tmp_path / "one", 3)
    assert_close(losses(tmp_path / "run"), losses(tmp_path / "one"))
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
