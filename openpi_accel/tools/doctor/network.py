"""How the nodes find each other, and what the environment says about networks."""

import errno
import ipaddress
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

from openpi_accel.parallel.platforms import Cluster
from openpi_accel.tools.doctor.finding import Finding

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
# gRPC, by which JAX's processes find each other, looks at these, in this order.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def nccl_settings(env: Mapping[str, str]) -> Finding:
    """The NCCL_ variables, as they are."""
    given = [f"{name}={value}" for name, value in sorted(env.items()) if name.startswith("NCCL_")]
    return Finding(name="NCCL settings", level="ok", seen=" ".join(given) or "none; NCCL decides by itself")


def socket_interface(env: Mapping[str, str], sys: pathlib.Path) -> Finding:
    """Whether NCCL_SOCKET_IFNAME leaves NCCL a network interface.

    The value is a list of name prefixes; a leading = makes them whole names, a leading ^ excludes them.

    Args:
        env: with the variable.
        sys: the folder /sys.
    """
    name, value = "NCCL interface", env.get("NCCL_SOCKET_IFNAME", "").strip()
    there = sorted(folder.name for folder in (sys / "class" / "net").glob("*") if folder.is_dir())
    interfaces = ", ".join(there) or "none"
    if not value:
        seen = f"NCCL_SOCKET_IFNAME is not set; NCCL chooses among {interfaces}"
        return Finding(name=name, level="ok", seen=seen)
    excludes, value_of_list = value.startswith("^"), value.removeprefix("^")
    exact, listed = value_of_list.startswith("="), value_of_list.removeprefix("=").split(",")
    words = [word.strip() for word in listed if word.strip()]
    matches = {word: [one for one in there if (one == word if exact else one.startswith(word))] for word in words}
    named = {one for found in matches.values() for one in found}
    chosen = sorted(set(there) - named - {"lo"} if excludes else named)
    seen = f"NCCL_SOCKET_IFNAME={value} leaves {', '.join(chosen) or 'none'} of {interfaces}"
    if not chosen:
        advice = "Name one that is there (ip -brief address), or unset NCCL_SOCKET_IFNAME."
        return Finding(name=name, level="error", seen=seen, advice=advice)
    absent = [word for word, found in matches.items() if not found]
    if absent and not excludes:
        advice = f"No interface fits {', '.join(absent)}: leave it out, or correct it."
        return Finding(name=name, level="warning", seen=seen, advice=advice)
    down = [one for one in chosen if _state(sys, one) == "down"]
    if len(down) == len(chosen):
        return Finding(name=name, level="warning", seen=f"{seen}; down", advice="Name one that is up (ip -brief link).")
    return Finding(name=name, level="ok", seen=seen)


def coordinator(cluster: Cluster | None, resolve: Callable[[str], Sequence[str]]) -> Finding:
    """Whether node 0 has an address. None is a warning: the name of a node that starts later appears later.

    Args:
        cluster: what the platform tells; None is one node.
        resolve: host -> its addresses; OSError where it has none.
    """
    name = "coordinator"
    if cluster is None:
        return Finding(name=name, level="ok", seen="one node: nothing tells of several")
    host = cluster.host
    try:
        addresses = list(dict.fromkeys(resolve(host)))
    except OSError as error:
        return Finding(
            name=name,
            level="warning",
            seen=f"{cluster.describe()}: {host} has no address here ({error})",
            advice="Training goes on trying for some minutes. If node 0 runs already, check the name, or give its "
            "address: MASTER_ADDR=10.0.0.1.",
        )
    seen = cluster.describe() + ("" if addresses == [host] else f", which is {', '.join(addresses)}")
    loopback = all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
    if loopback and cluster.process_id != 0:
        advice = (
            f"MASTER_ADDR={host} is this node itself. Give the address by which the other nodes reach node 0, unless "
            "all processes run on this machine."
        )
        return Finding(name=name, level="warning", seen=seen, advice=advice)
    return Finding(name=name, level="ok", seen=seen)


def coordinator_port(cluster: Cluster | None, listen: Callable[[int], None]) -> Finding:
    """Whether node 0 can listen on the coordinator's port.

    Args:
        cluster: what the platform tells; None is one node.
        listen: listens on a port of all addresses for a moment; OSError where it cannot.
    """
    name = "coordinator's port"
    if cluster is None:
        return Finding(name=name, level="ok", seen="one node: none is needed")
    if cluster.process_id != 0:
        return Finding(name=name, level="unknown", seen=f"{cluster.port} of node 0, which may not have started yet")
    try:
        listen(cluster.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = (
                f"End what holds it (ss -ltnp 'sport = :{cluster.port}'), often an older run, or choose another port: "
                "MASTER_PORT."
            )
        else:
            advice = "Choose another port on all nodes, for example MASTER_PORT=29500."
        return Finding(name=name, level="error", seen=f"{cluster.port}: {error.strerror or error}", advice=advice)
    return Finding(name=name, level="ok", seen=f"{cluster.port} is free")


def offline(env: Mapping[str, str]) -> Finding:
    """The offline switches; training fetches nothing either way."""
    given = [f"{name}={env[name]}" for name in _OFFLINE if env.get(name)]
    return Finding(name="offline", level="ok", seen=" ".join(given) or "no switch is set; training fetches nothing")


def proxy(env: Mapping[str, str], cluster: Cluster | None) -> Finding:
    """The proxies, without passwords; a warning where one stands between the nodes."""
    given = {name.lower(): value for name, value in env.items() if name.lower() in (*_PROXIES, "no_proxy") and value}
    shown = " ".join(f"{name}={re.sub(r'//[^/@]*@', '//***@', value)}" for name, value in sorted(given.items()))
    if not any(name in given for name in _PROXIES):
        return Finding(name="proxy", level="ok", seen=shown or "none")
    if cluster is not None and not _bypasses(given.get("no_proxy", ""), cluster.host):
        advice = f"JAX's processes may look for node 0 there. Set no_proxy={cluster.host} (added to what is in it)."
        return Finding(name="proxy", level="warning", seen=shown, advice=advice)
    return Finding(name="proxy", level="ok", seen=shown)


def _bypasses(no_proxy: str, host: str) -> bool:
    """gRPC compares the end of the host's name, or the address with a network."""
    entries = [entry.strip() for entry in no_proxy.split(",") if entry.strip()]
    return any(host.endswith(entry.removeprefix("*")) or _in_network(host, entry) for entry in entries)


def _in_network(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _state(sys: pathlib.Path, interface: str) -> str:
    try:
        return (sys / "class" / "net" / interface / "operstate").read_text().strip()
    except OSError:
        return "unknown"
