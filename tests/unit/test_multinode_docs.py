"""The scripts and manifests of docs/multinode.md: they parse, and start what they say."""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from openpi_accel.parallel.platforms import PLATFORMS, parse
from tests.conftest import REPO

TEXT = (REPO / "docs" / "multinode.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def manifest(kind: str) -> Any:
    return next(value for value in map(yaml.safe_load, blocks("yaml")) if value["kind"] == kind)


def shell_problems(script: str) -> str:
    checkers = [["bash", "-n"]]
    if shutil.which("shellcheck"):
        checkers.append(["shellcheck", "--shell=bash", "-"])
    done = [subprocess.run(checker, input=script, capture_output=True, text=True) for checker in checkers]
    return "".join(one.stdout + one.stderr for one in done)


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return dict(only)


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(pod)["env"]}


@pytest.mark.parametrize("number", range(len(blocks("bash"))))
def test_shell_blocks_parse(number: int) -> None:
    assert shell_problems(blocks("bash")[number]) == ""


def test_the_checks_see_something() -> None:
    assert len(blocks("bash")) >= 4 and len(blocks("yaml")) == 2
    assert shell_problems("if true; then") != ""


def test_the_slurm_script_starts_one_task_per_node() -> None:
    (script,) = (block for block in blocks("bash") if "#SBATCH" in block)
    assert "#SBATCH --ntasks-per-node=1\n" in script and re.search(r"^srun .*run_multinode\.sh", script, re.MULTILINE)


def test_the_jobset_describes_its_cluster() -> None:
    jobset = manifest("JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    env = variables(job["template"])
    name = jobset["metadata"]["name"]
    assert env["MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}" and replicated["replicas"] == 1
    assert int(env["WORLD_SIZE"]) == job["parallelism"] == job["completions"]
    cluster = parse(env | {"JOB_COMPLETION_INDEX": "1"})
    assert cluster is not None and (cluster.num_processes, cluster.process_id) == (job["completions"], 1)
    named = {"JOBSET_NAME": name, "REPLICATED_JOB_NAME": replicated["name"], "WORLD_SIZE": "2"}
    told = parse(named | {"JOB_COMPLETION_INDEX": "1"})
    assert told is not None and told.coordinator_address == cluster.coordinator_address
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container(job["template"])["name"]


def test_the_pytorch_job_has_one_process_per_node() -> None:
    job = manifest("PyTorchJob")["spec"]
    master, worker = job["pytorchReplicaSpecs"]["Master"], job["pytorchReplicaSpecs"]["Worker"]
    assert job["nprocPerNode"] == "1" and master["template"] == worker["template"]
    assert master["replicas"] == 1 and "elasticPolicy" not in job
    assert not {"WORLD_SIZE", "RANK"} & set(variables(master["template"]))  # the operator sets them


@pytest.mark.parametrize("kind", ["JobSet", "PyTorchJob"])
def test_pods_run_the_launcher_in_place_of_their_shell(kind: str) -> None:
    spec = manifest(kind)["spec"]
    if kind == "JobSet":
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]
    else:
        pod = spec["pytorchReplicaSpecs"]["Master"]["template"]
    (script,) = container(pod)["args"]
    (grace_s,) = re.findall(r"--grace-s (\d+)", script)
    assert 0 < int(grace_s) <= pod["spec"]["terminationGracePeriodSeconds"]
    assert shell_problems(script) == "" and "exec bash run_multinode.sh" in script
    mounts = {mount["name"] for mount in container(pod)["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}


def test_the_table_names_every_variable_that_is_read() -> None:
    for row in PLATFORMS:
        for name in (row.size, row.rank, row.address, row.port, *row.hosts[:1]):
            assert not name or f"`{name}`" in TEXT, name
