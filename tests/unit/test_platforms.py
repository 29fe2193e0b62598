"""The platforms' variables: what is read, which platform wins, and what each mistake says."""

import pytest

from openpi_accel.errors import UserError
from openpi_accel.parallel.hostlist import expand_hosts
from openpi_accel.parallel.platforms import PLATFORMS, Cluster, parse, require_several

GOOD = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}
# What the variables look like in a process of each platform; the second of two nodes.
SLURM_JOB = {"SLURM_JOB_ID": "4097", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NTASKS": "2"}
SLURM_BATCH = SLURM_JOB | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
SRUN = SLURM_JOB | {
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
# The shell of salloc, where it is started as a step of its own.
SALLOC = SLURM_JOB | {
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "gpu07",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "8",
    "JOB_COMPLETION_INDEX": "1",
}
PYTORCH_JOB = GOOD | {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "auto"}
JOBSET = {"JOB_COMPLETION_INDEX": "1", "JOBSET_NAME": "pi", "REPLICATED_JOB_NAME": "node", "WORLD_SIZE": "2"}


def summary(cluster: Cluster | None) -> tuple[str, int, int] | None:
    return cluster and (cluster.coordinator_address, cluster.num_processes, cluster.process_id)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PATH": "/bin"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {name: "" for name in GOOD},
        SLURM_BATCH,  # a batch script is one process, however many nodes the job has
        SLURM_JOB,  # so is the shell of salloc
        SALLOC,
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"},  # a one-node step
        SRUN | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "8", "WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"PET_NNODES": "1", "PET_NODE_RANK": "0"},
        {"JOB_COMPLETION_INDEX": "5"},  # an indexed Job of single runs
        TRAIN_JOB | {"WORLD_SIZE": "1"},
    ],
)
def test_one_node(env: dict[str, str]) -> None:
    assert parse(env) is None


@pytest.mark.parametrize(
    ("env", "expected", "started_by"),
    [
        (GOOD, ("10.0.0.1:29500", 2, 1), "the variables MASTER_ADDR"),
        (GOOD | {"MASTER_ADDR": "fd00::1"}, ("[fd00::1]:29500", 2, 1), "the variables"),
        (GOOD | {"MASTER_ADDR": "[fd00::1]"}, ("[fd00::1]:29500", 2, 1), "the variables"),
        (SRUN, ("gpu07:61441", 2, 1), "Slurm"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, ("gpu07:61441", 2, 1), "Slurm"),
        (SRUN | {"MASTER_PORT": "1234"}, ("gpu07:1234", 2, 1), "Slurm with MASTER_PORT as set"),
        # The usual lines of a batch script for torch, which leave RANK to the program.
        (SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "7", "WORLD_SIZE": "2"}, ("a:7", 2, 1), "Slurm with MASTER_ADDR"),
        (SRUN | {"PMI_RANK": "1", "PMI_SIZE": "2"}, ("gpu07:61441", 2, 1), "Slurm"),  # srun --mpi=pmi2
        (SALLOC | GOOD, ("10.0.0.1:29500", 2, 1), "the variables"),
        (OPEN_MPI | {"MASTER_ADDR": "a"}, ("a:29500", 2, 1), "Open MPI with MASTER_ADDR as set"),
        (SRUN | OPEN_MPI | {"MASTER_ADDR": "a"}, ("a:29500", 2, 1), "Open MPI"),  # mpirun starts its daemons by srun
        (SALLOC | HYDRA | {"MASTER_ADDR": "a"}, ("a:29500", 2, 1), "MPICH or Intel MPI"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a"}, ("a:29500", 2, 1), "MPI (PMI variables)"),
        (TRAIN_JOB, ("job-node-0-0.job:29400", 2, 1), "Kubeflow"),
        (TRAIN_JOB | {"PET_NNODES": "2:2"}, ("job-node-0-0.job:29400", 2, 1), "Kubeflow"),
        (PYTORCH_JOB, ("10.0.0.1:29500", 2, 1), "the variables"),
        (JOBSET, ("pi-node-0-0.pi:29500", 2, 1), "a Kubernetes JobSet"),
        (JOBSET | {"JOBSET_SUBDOMAIN": "net"}, ("pi-node-0-0.net:29500", 2, 1), "a Kubernetes JobSet"),
        (
            {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0.svc"},
            ("job-0.svc:29500", 2, 1),
            "a Kubernetes",
        ),
    ],
)
def test_second_of_two_nodes(env: dict[str, str], expected: tuple[str, int, int], started_by: str) -> None:
    cluster = parse(env)
    assert cluster is not None and summary(cluster) == expected
    assert cluster.started_by.startswith(started_by)
    assert cluster.describe() == f"started by {cluster.started_by}: node 1 of 2, coordinator {expected[0]}"


@pytest.mark.parametrize("row", PLATFORMS, ids=lambda row: row.name)
def test_all_four_plain_variables_win_over_every_platform(row) -> None:
    assert summary(parse({name: "999" for name in row.signs} | GOOD)) == ("10.0.0.1:29500", 2, 1)


def test_slurm_names_its_nodes() -> None:
    assert parse(SRUN).hosts == ("gpu07", "gpu08")  # type: ignore[union-attr]
    assert parse(SRUN | {"WORLD_SIZE": "3"}).hosts == ()  # type: ignore[union-attr]


def test_jobs_on_one_slurm_node_take_different_ports() -> None:
    ports = {parse(SRUN | {"SLURM_JOB_ID": str(job)}).port for job in range(8192)}  # type: ignore[union-attr]
    assert ports == set(range(61440, 65536))


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_variable_is_named_with_an_example(name: str) -> None:
    env = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(UserError, match=rf"^{name} is not set: .* {name}=.*MASTER_ADDR=10\.0\.0\.1 .*unset"):
        parse(env)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (GOOD | {"RANK": "2"}, "RANK=2 is not right.* 0 to 1.*RANK=0"),
        (GOOD | {"RANK": "-1"}, "RANK=-1 is not right.*a whole number"),
        (GOOD | {"RANK": "node0"}, "RANK=node0"),
        (GOOD | {"WORLD_SIZE": "two"}, "WORLD_SIZE=two.*WORLD_SIZE=2"),
        (GOOD | {"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        (GOOD | {"WORLD_SIZE": "²"}, "WORLD_SIZE=²"),
        (GOOD | {"MASTER_PORT": "http"}, "MASTER_PORT=http.*1 to 65535"),
        (GOOD | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        (GOOD | {"MASTER_ADDR": "10.0.0.1:29500"}, "has a port in it"),
        (GOOD | {"MASTER_ADDR": "http://a"}, "MASTER_ADDR=http://a is no host.*for example"),
        (GOOD | {"MASTER_ADDR": "a b"}, "MASTER_ADDR=a b is no host"),
        (GOOD | {"NPROC_PER_NODE": "all"}, "NPROC_PER_NODE=all.*NPROC_PER_NODE=8"),
        (GOOD | {"LOCAL_RANK": "3"}, "LOCAL_RANK=3.*one per node"),
        (GOOD | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, "LOCAL_RANK=0.*one per node"),
        (GOOD | {"WORLD_SIZE": "16", "NPROC_PER_NODE": "8", "NNODES": "2"}, "counts GPUs.*export WORLD_SIZE=2"),
        (PYTORCH_JOB | {"WORLD_SIZE": "16", "PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8.*export WORLD_SIZE=2"),
        (SRUN | {"WORLD_SIZE": "16", "NPROC_PER_NODE": "8"}, "counts GPUs.*export WORLD_SIZE=2"),
        (
            SRUN | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"},
            r"SLURM_STEP_TASKS_PER_NODE=8\(x2\).*8 processes.*srun --ntasks-per-node=1.*WORLD_SIZE=1",
        ),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1,2"}, "2 processes on a node"),
        (SRUN | {"SLURM_NODEID": "x"}, "SLURM_NODEID=x is not right: the index of this node"),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu[07-"}, r"SLURM_STEP_NODELIST=gpu\[07- is no list.*MASTER_ADDR"),
        (SLURM_BATCH | {"MASTER_ADDR": "gpu07"}, "MASTER_PORT is not set .*srun --ntasks-per-node=1"),
        (OPEN_MPI, "MASTER_ADDR is not set.*Open MPI.*-x MASTER_ADDR=node01"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun --map-by ppr:1:node"),
        (HYDRA, "MASTER_ADDR is not set.*MPICH.*-genv MASTER_ADDR node01"),
        (HYDRA | {"MPI_LOCALNRANKS": "4"}, "mpiexec -ppn 1"),
        (TRAIN_JOB | {"PET_NNODES": "1:4"}, "PET_NNODES=1:4 is a range.*WORLD_SIZE=4"),
        ({"PET_NNODES": "2:2"}, r"MASTER_ADDR is not set \(nor RANK\), nor is PET_MASTER_ADDR.*elasticPolicy"),
        ({"JOB_COMPLETION_INDEX": "1", "JOBSET_NAME": "pi"}, "MASTER_ADDR is not set .nor WORLD_SIZE.*<jobset>-"),
        ({"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set.*headless"),
    ],
)
def test_a_mistake_is_explained(env: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(env)


def test_all_mistakes_are_told_at_once() -> None:
    wrong = {"MASTER_ADDR": "10.0.0.1:29500", "MASTER_PORT": "http", "RANK": "x", "WORLD_SIZE": "two"}
    with pytest.raises(UserError) as caught:
        parse(wrong)
    lines = str(caught.value).splitlines()
    assert [line.split("=")[0] for line in lines] == ["WORLD_SIZE", "RANK", "MASTER_PORT", "MASTER_ADDR"]
    with pytest.raises(UserError) as caught:
        parse({"MASTER_PORT": "0", "RANK": "2", "WORLD_SIZE": "2"})
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("MASTER_ADDR is not set: ") and lines[1].startswith("RANK=2 is not right")
    assert lines[2].startswith("MASTER_PORT=0 is not right") and len(lines) == 3


def test_sixteen_nodes_of_eight_gpus_are_no_mistake() -> None:
    assert parse(GOOD | {"WORLD_SIZE": "16", "NPROC_PER_NODE": "8", "NNODES": "16"}) is not None
    assert parse(GOOD | {"WORLD_SIZE": "16", "NPROC_PER_NODE": "auto"}) is not None


def test_a_launcher_of_several_nodes_wants_to_be_told() -> None:
    for env in (GOOD, SRUN, SALLOC, {"WORLD_SIZE": "1"}):
        assert require_several(env) is None
    with pytest.raises(UserError, match="MASTER_ADDR is not set.*WORLD_SIZE=2.*run_opt.sh"):
        require_several({})
    with pytest.raises(UserError, match="srun --ntasks-per-node=1"):
        require_several(SLURM_BATCH)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node01", ["node01"]),
        ("node01,gpu5", ["node01", "gpu5"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]-ib.hpc", ["n098-ib.hpc", "n099-ib.hpc", "n100-ib.hpc", "n101-ib.hpc"]),
        ("rack[1-2]n[3,5]", ["rack1n3", "rack1n5", "rack2n3", "rack2n5"]),
        ("a-b-[1],c", ["a-b-1", "c"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text, "X")) == hosts


@pytest.mark.parametrize(
    "text", ["", "a,", ",a", "a[", "a]", "a[]", "a[1-]", "a[3-1]", "a[x]", "a b", "a[1,]", "a[[1]]"]
)
def test_no_host_list(text: str) -> None:
    with pytest.raises(UserError, match="X=.*is no list of hosts"):
        expand_hosts(text, "X")


@pytest.mark.parametrize(
    ("env", "doubted"),
    [
        (GOOD | {"WORLD_SIZE": "16", "NPROC_PER_NODE": "8"}, True),
        (GOOD | {"WORLD_SIZE": "16", "NPROC_PER_NODE": "8", "NNODES": "16"}, False),  # the platform agrees
        (GOOD | {"WORLD_SIZE": "12", "NPROC_PER_NODE": "8"}, False),
        (GOOD | {"WORLD_SIZE": "16", "NPROC_PER_NODE": "1"}, False),
        (GOOD | {"WORLD_SIZE": "16"}, False),
    ],
)
def test_a_size_that_may_count_gpus_is_doubted_while_others_are_awaited(env: dict[str, str], doubted: bool) -> None:
    cluster = parse(env)
    assert cluster is not None
    assert cluster.describe().endswith("16 GPUs, 8 on each node: export WORLD_SIZE=2") == doubted
