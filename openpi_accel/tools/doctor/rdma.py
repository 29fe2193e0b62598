"""The node's RDMA ports (InfiniBand, or RoCE over Ethernet), from the kernel's files, against NCCL's settings."""

import dataclasses
import ipaddress
import pathlib
from collections.abc import Mapping, Sequence

from openpi_accel.tools.doctor.finding import Finding

_ROCE_V2 = "RoCE v2"
_DEVICE_ADVICE = "Start the container with --device=/dev/infiniband (or --privileged) and --network=host."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gid:
    """One address of a RoCE port: by which protocol, and which."""

    protocol: str
    address: ipaddress.IPv6Address

    def __str__(self) -> str:
        return f"{self.protocol}, {self.address.ipv4_mapped or self.address}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Port:
    """One port of an RDMA device.

    Attributes:
        name: device:port, as NCCL_IB_HCA names it.
        link_layer: InfiniBand or Ethernet.
        state: ACTIVE where it works.
        rate: in the kernel's words, for example 400 Gb/sec (4X NDR).
        gids: index -> address, those in use.
    """

    name: str
    link_layer: str
    state: str
    rate: str
    gids: Mapping[int, Gid]


def read_ports(sys: pathlib.Path) -> list[Port]:
    """All RDMA ports of the node.

    Args:
        sys: the folder /sys.
    """
    folders = sorted((sys / "class" / "infiniband").glob("*/ports/*"), key=lambda folder: _natural(folder))
    return [
        Port(
            name=f"{folder.parent.parent.name}:{folder.name}",
            link_layer=_read(folder / "link_layer") or "unknown link",
            state=(_read(folder / "state") or "unknown").rpartition(": ")[2],  # the file says "4: ACTIVE"
            rate=_read(folder / "rate") or "unknown rate",
            gids=_read_gids(folder),
        )
        for folder in folders
    ]


def is_used(ports: Sequence[Port], dev: pathlib.Path, env: Mapping[str, str]) -> bool:
    """Whether NCCL would go by RDMA: a working port, the device files to reach it, and it is not switched off."""
    return not _switched_off(env) and bool(_device_files(dev)) and any(port.state == "ACTIVE" for port in ports)


def devices(ports: Sequence[Port], dev: pathlib.Path, env: Mapping[str, str]) -> Finding:
    """Whether the ports can be reached: the device files of a container are given to it or not.

    Args:
        ports: from `read_ports`.
        dev: the folder /dev.
        env: for NCCL_IB_DISABLE.
    """
    folder, files = dev / "infiniband", _device_files(dev)
    seen = f"{len(ports)} ports; {folder} " + (f"with {len(files)} devices" if files else "is not there or empty")
    if _switched_off(env):
        return Finding(
            name="RDMA", level="ok", seen=f"{seen}; switched off by NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']}"
        )
    if not ports and not files:
        return Finding(name="RDMA", level="ok", seen="none on this node; between nodes NCCL goes by TCP")
    if not ports or not files:
        advice = f"{_DEVICE_ADVICE} Otherwise NCCL goes by TCP, which is much slower between nodes."
        return Finding(name="RDMA", level="warning", seen=seen, advice=advice)
    if not any(port.state == "ACTIVE" for port in ports):
        return Finding(
            name="RDMA", level="warning", seen=f"{seen}; none is active", advice="Look at ibstat or rdma link."
        )
    return Finding(name="RDMA", level="ok", seen=seen)


def port_findings(ports: Sequence[Port], env: Mapping[str, str]) -> list[Finding]:
    """Link, state and rate of each port, and on RoCE whether NCCL_IB_GID_INDEX names a usable address of it."""
    return [_port(port, env) for port in ports]


def _port(port: Port, env: Mapping[str, str]) -> Finding:
    name = f"RDMA port {port.name}"
    seen = f"{port.link_layer}, {port.state}, {port.rate}"
    if _switched_off(env):
        return Finding(name=name, level="ok", seen=f"{seen}; not used")
    if port.state != "ACTIVE":
        advice = "NCCL leaves it out. Check cable, switch and subnet manager (ibstat, rdma link), if it should work."
        return Finding(name=name, level="warning", seen=seen, advice=advice)
    if port.link_layer != "Ethernet":
        return Finding(name=name, level="ok", seen=seen)
    usable = [index for index, gid in port.gids.items() if gid.protocol == _ROCE_V2 and gid.address.ipv4_mapped]
    seen += f"; RoCE v2 with an IPv4 address at GID index {', '.join(map(str, usable)) or 'none'}"
    return _gid_index(name, seen, port, usable, env.get("NCCL_IB_GID_INDEX", "").strip())


def _gid_index(name: str, seen: str, port: Port, usable: Sequence[int], chosen: str) -> Finding:
    """NCCL_IB_GID_INDEX against the port's addresses; without it NCCL (from 2.21) looks for a RoCE v2 one itself."""
    if chosen in ("", "-1"):
        if usable:
            return Finding(name=name, level="ok", seen=f"{seen}; NCCL chooses by itself")
        advice = "Give the port's network interface an IPv4 address, or the container the host's network."
        return Finding(name=name, level="warning", seen=seen, advice=advice)
    gid = port.gids.get(int(chosen)) if chosen.isdigit() else None
    seen += f"; NCCL_IB_GID_INDEX={chosen} is {gid or 'no address of it'}"
    if gid and gid.protocol == _ROCE_V2 and not gid.address.is_link_local:
        return Finding(name=name, level="ok", seen=seen)
    advice = f"Set NCCL_IB_GID_INDEX={usable[0]}, or " if usable else ""
    advice += (
        "unset NCCL_IB_GID_INDEX: NCCL then chooses for each port. (No matter if NCCL_IB_HCA leaves the port out.)"
    )
    return Finding(name=name, level="warning", seen=seen, advice=advice[0].upper() + advice[1:])


def _read_gids(port: pathlib.Path) -> dict[int, Gid]:
    gids = {}
    for file in (port / "gids").glob("*"):
        text, protocol = _read(file), _read(port / "gid_attrs" / "types" / file.name)
        if not file.name.isdigit() or text is None or protocol is None:
            continue  # an entry that is not in use cannot be read
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            continue
        if int(address):
            gids[int(file.name)] = Gid(protocol=protocol, address=address)
    return dict(sorted(gids.items()))


def _device_files(dev: pathlib.Path) -> list[pathlib.Path]:
    return sorted((dev / "infiniband").glob("uverbs*"))


def _switched_off(env: Mapping[str, str]) -> bool:
    return env.get("NCCL_IB_DISABLE", "").strip() not in ("", "0")


def _natural(port: pathlib.Path) -> tuple[int, str, str]:
    """mlx5_10 after mlx5_9."""
    device = port.parent.parent.name
    return len(device), device, port.name


def _read(path: pathlib.Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
