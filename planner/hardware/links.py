"""Arithmetic for collectives: bus factors, bus bandwidths and latencies from a link's figures.

Sizes follow nccl-tests: an all-reduce's tensor, an all-gather's whole output, a reduce-scatter's
whole input, a rank's whole send buffer in an all-to-all, a p2p message. The bus bandwidth is
`factor × bytes / seconds`, which compares with a link's bandwidth for any number of ranks.
"""

from __future__ import annotations

import math

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "p2p")


def bus_factor(collective: str, ranks: int) -> float:
    """Return how many bytes pass the busiest link per byte of the size."""
    if collective == "p2p":
        return 1.0
    return (2 if collective == "all-reduce" else 1) * (ranks - 1) / ranks


def bus_bandwidth(collective: str, ranks: int, per_node: int, node: float, network: float) -> float:
    """Return the group's bus bandwidth in bytes/s, from the bandwidths of a device's two links.

    All groups with this shape run at once, so every rank uses its link to the network. A ring
    enters a node through the links of `per_node` ranks and has as many times the bandwidth. In an
    all-to-all a rank sends its parts to all ranks through its two links.
    """
    if per_node == ranks:
        return node
    if collective == "p2p":
        return network
    if collective == "all-to-all":
        remote, local = (ranks - per_node) / network, (per_node - 1) / node
        return (ranks - 1) / max(remote, local)
    return min(node, per_node * network)


def latency(collective: str, ranks: int, per_node: int, node: float, network: float) -> float:
    """Return the seconds that an empty collective takes, from the seconds per hop on each link.

    The formulas are NCCL's tuning model (src/graph/tuning.cc): a ring has n - 1 hops, an all-reduce
    two rings or a tree, whichever is quicker.
    """
    nodes = ranks // per_node
    hop = node if nodes == 1 else network
    if collective in ("p2p", "all-to-all"):
        return hop
    network_hops = nodes - 1
    ring = (ranks - 1 - network_hops) * node + network_hops * network
    if collective != "all-reduce":
        return ring
    tree = (per_node - 1) * node + math.log2(nodes) * network
    return 2 * min(ring, tree)
