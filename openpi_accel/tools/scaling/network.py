"""How long a collective takes, by the model that NCCL itself chooses algorithms by (src/graph/tuning.cc).

Time = latency + bytes / bandwidth, of a ring, or for all-reduce of a tree where that is shorter. The latencies are
those of NCCL's table for its protocol for large messages ("Simple"); nothing is fitted.
"""

import dataclasses
import math

from openpi_accel.tools.scaling.traffic import Kind

_BASE_US, _RING_NVLINK_US, _RING_NETWORK_US, _TREE_US = 8.4, 3.4, 14.0, 28.0
# A tree reaches this part of a ring's bandwidth.
_TREE_SHARE = 0.92


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """Rates in one direction, in GB/s (10^9 bytes).

    Attributes:
        nvlink_gb_s: of one GPU to the others of its node.
        network_gb_s: of one GPU's share of the node's network cards.
    """

    nvlink_gb_s: float
    network_gb_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Members:
    """Who takes part in a collective.

    Attributes:
        num_devices: all of them.
        num_nodes: over how many nodes they are spread evenly. All groups of a kind work at the same time, so each has
            the network of its own devices.
    """

    num_devices: int
    num_nodes: int


def collective_s(kind: Kind, num_bytes: float, num_calls: int, members: Members, links: Links) -> float:
    """Seconds for `num_calls` collectives over arrays of `num_bytes` together.

    Args:
        num_bytes: of the whole arrays: the result of a gather, the operand of a reduction.
    """
    devices, nodes = members.num_devices, members.num_nodes
    if devices == 1:
        return 0.0
    bandwidth = links.nvlink_gb_s * 1e9
    if nodes > 1:
        # A ring enters and leaves each node once; several rings share the node's cards.
        bandwidth = min(bandwidth, links.network_gb_s * 1e9 * devices / nodes)
    rounds = 2 if kind == "all-reduce" else 1
    hops = rounds * (devices - 1)
    network_hops = 0 if nodes == 1 else (rounds * nodes if kind == "all-reduce" else nodes - 1)
    ring_us = _BASE_US + (hops - network_hops) * _RING_NVLINK_US + network_hops * _RING_NETWORK_US
    ring = num_calls * ring_us * 1e-6 + hops / devices * num_bytes / bandwidth
    if kind != "all-reduce":
        return ring
    tree_us = 2 * (devices / nodes - 1 + math.ceil(math.log2(nodes))) * _TREE_US
    tree = num_calls * tree_us * 1e-6 + 2 * num_bytes / (bandwidth * _TREE_SHARE)
    return min(ring, tree)
