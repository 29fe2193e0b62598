"""Looks whether this node is ready to train, before training starts."""

import argparse
import dataclasses
import json
import pathlib
import subprocess
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from openpi_accel.config.command_line import parse_train_config
from openpi_accel.config.environment import Environment
from openpi_accel.config.schema import TrainConfig
from openpi_accel.errors import UserError
from openpi_accel.parallel.platforms import parse
from openpi_accel.tools.doctor import files, gpus, limits, network, rdma
from openpi_accel.tools.doctor.finding import Check, Finding, Level, examine
from openpi_accel.tools.doctor.machine import Machine

_PROG = "python scripts/doctor.py"
_DESCRIPTION = (
    f"{__doc__} Takes the options of scripts/train.py, so that it looks for what that run needs; without a config it "
    "looks at the node alone (--checkpoint-base-dir is taken then too). Further: --quick (leaves out what starts JAX "
    "or reads the dataset), --json (one line of JSON instead of a table). Exit code 1 where something is an error."
)
_COLOURS: dict[Level, str] = {"ok": "green", "warning": "yellow", "error": "red", "unknown": "dim"}
_DEFAULT_CHECKPOINTS = "checkpoints"


def main(argv: Sequence[str], env: Mapping[str, str], machine: Machine | None = None) -> int:
    """The script: `doctor.py [CONFIG [train options]] [--quick] [--json]`.

    Returns:
        1 if a finding is an error, else 0.

    Raises:
        UserError: wrong usage.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(argv)
    config, checkpoints = None, _DEFAULT_CHECKPOINTS
    if rest and rest[0].startswith("--checkpoint-base-dir"):
        checkpoints = _checkpoints_alone(rest)
    elif rest:
        config = parse_train_config(rest, prog=_PROG, description=_DESCRIPTION)
        checkpoints = config.checkpoint_base_dir
    findings = diagnose(config, pathlib.Path(checkpoints).expanduser(), env, machine or Machine(), quick=own.quick)
    if own.json:
        print(json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings]}, ensure_ascii=False))
    else:
        _print(findings)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def diagnose(
    config: TrainConfig | None, checkpoints: pathlib.Path, env: Mapping[str, str], machine: Machine, *, quick: bool
) -> list[Finding]:
    """All findings of this node, in the order of the report.

    Args:
        config: the run's; None leaves out its files.
        checkpoints: folder of the checkpoints.
        env: the process's environment.
        machine: the node.
        quick: neither start JAX nor read the dataset.
    """
    ports = rdma.read_ports(machine.sys)
    is_rdma = rdma.is_used(ports, machine.dev, env)
    checks: list[tuple[str, Check]] = [
        ("memlock", lambda: limits.memlock(machine.getrlimit, machine.proc, rdma=is_rdma)),
        ("open files", lambda: limits.open_files(machine.getrlimit)),
        ("shared memory", lambda: limits.shared_memory(machine.disk_usage, machine.dev)),
        ("RDMA", lambda: rdma.devices(ports, machine.dev, env)),
        ("RDMA ports", lambda: rdma.port_findings(ports, env)),
        ("NCCL settings", lambda: network.nccl_settings(env)),
        ("NCCL interface", lambda: network.socket_interface(env, machine.sys)),
        *_nodes(env, machine),
        ("offline", lambda: network.offline(env)),
        ("GPUs", lambda: gpus.survey(machine.run, env, machine.cuda_versions())),
        ("checkpoint folder", lambda: files.checkpoint_folder(checkpoints)),
    ]
    if quick:
        stated = files.stated_checkpoint_gib(config)
        checks.append(("free disk", lambda: files.free_disk(checkpoints, machine.disk_usage, stated, exact=False)))
    else:
        checks += _slow_checks(config, checkpoints, env, machine)
    if config is not None and config.name == "pi05_demo":
        checks.append(("data", lambda: Finding(name="data", level="ok", seen="the demo makes its own")))
    elif config is not None:
        environment = Environment.from_env(env)
        checks += [
            ("dataset", lambda: files.dataset(config, environment, quick=quick)),
            ("tokenizer", lambda: files.tokenizer(config, environment)),
            ("norm statistics", lambda: files.norm_statistics(config)),
            ("base weights", lambda: files.base_weights(config, environment)),
        ]
    return examine(checks)


def _nodes(env: Mapping[str, str], machine: Machine) -> list[tuple[str, Check]]:
    """How this node finds the others, by the same word of the platform that training takes."""
    try:
        cluster = parse(env)
    except UserError as error:
        advice = str(error)
        wrong = Finding(name="nodes", level="error", seen="it cannot be told which node this is", advice=advice)
        return [("nodes", lambda: wrong)]
    return [
        ("coordinator", lambda: network.coordinator(cluster, machine.resolve)),
        ("coordinator's port", lambda: network.coordinator_port(cluster, machine.listen)),
        ("proxy", lambda: network.proxy(env, cluster)),
    ]


def _slow_checks(
    config: TrainConfig | None, checkpoints: pathlib.Path, env: Mapping[str, str], machine: Machine
) -> list[tuple[str, Check]]:
    from openpi_accel.tools.doctor import devices  # starts no device, but imports JAX

    def free_disk() -> Finding:
        gib = files.stated_checkpoint_gib(None) if config is None else devices.checkpoint_gib(config)
        return files.free_disk(checkpoints, machine.disk_usage, gib, exact=config is not None)

    return [
        ("JAX devices", lambda: devices.jax_devices(_num_gpus(env, machine))),
        ("first all-reduce", devices.first_collective),
        ("free disk", free_disk),
    ]


def _num_gpus(env: Mapping[str, str], machine: Machine) -> int:
    """GPUs that JAX should see."""
    if env.get("JAX_PLATFORMS", "").strip() == "cpu":
        return 0
    try:
        return len(gpus.visible(gpus.query(machine.run), env))
    except (OSError, subprocess.SubprocessError):  # a finding of its own
        return 0


def _checkpoints_alone(rest: Sequence[str]) -> str:
    """The folder of `--checkpoint-base-dir FOLDER` without a config."""
    name, equals, value = rest[0].partition("=")
    words = [value, *rest[1:]] if equals else list(rest[1:])
    if name != "--checkpoint-base-dir" or len(words) != 1 or not words[0]:
        raise UserError(
            f"{' '.join(rest)} is not understood. Write {_PROG} CONFIG with the options of training, or "
            f"{_PROG} --checkpoint-base-dir FOLDER alone."
        )
    return words[0]


def _print(findings: Sequence[Finding]) -> None:
    table = Table("check", "", "seen")
    table.columns[2].overflow = "fold"
    for finding in findings:
        level = f"[{_COLOURS[finding.level]}]{finding.level}[/]"
        table.add_row(escape(finding.name), level, escape(finding.seen))
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    for finding in findings:
        if finding.advice:  # whole, unbroken lines, to copy commands from
            print(f"{finding.level}: {finding.name}: {finding.seen}. {finding.advice}")
