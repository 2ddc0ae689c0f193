"""Arithmetic of collectives: bus factors, and the time that a link's figures imply.

Sizes are those of nccl-tests: the tensor of an all-reduce, the whole output of an all-gather, the
whole input of a reduce-scatter, the whole send buffer of a rank in an all-to-all, the message of a
p2p transfer. The bus bandwidth is `factor × bytes / seconds`: it can be compared with the
bandwidth of a link for any number of ranks.
"""

from __future__ import annotations

import math

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "p2p")


def bus_factor(collective: str, ranks: int) -> float:
    """Return the bytes that pass the busiest link, for each byte of the size."""
    if collective == "p2p":
        return 1.0
    return (2 if collective == "all-reduce" else 1) * (ranks - 1) / ranks


def bus_bandwidth(collective: str, ranks: int, per_node: int, node: float, network: float) -> float:
    """Return the bus bandwidth of a group, from the bandwidths of each device's two links.

    All groups of this shape run at once, so a rank has its own link to the network. A ring that
    enters a node through the links of `per_node` ranks has as many times the bandwidth of one. An
    all-to-all sends each rank's part to each other rank through its own links.
    """
    if per_node == ranks:
        return node
    if collective == "p2p":
        return network
    if collective == "all-to-all":
        outside, inside = (ranks - per_node) / network, (per_node - 1) / node
        return (ranks - 1) / max(outside, inside)
    return min(node, per_node * network)


def latency(collective: str, ranks: int, per_node: int, node: float, network: float) -> float:
    """Return the seconds of an empty collective, from the latencies of a hop of each link.

    These are the formulas of NCCL's tuning model (src/graph/tuning.cc): a ring has n - 1 hops, an
    all-reduce two rings or a tree, whichever is quicker.
    """
    nodes = ranks // per_node
    hop = node if nodes == 1 else network
    if collective in ("p2p", "all-to-all"):
        return hop
    between = nodes - 1
    ring = (ranks - 1 - between) * node + between * network
    if collective != "all-reduce":
        return ring
    tree = (per_node - 1) * node + math.log2(nodes) * network
    return 2 * min(ring, tree)
