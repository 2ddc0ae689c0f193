"""Products and messages of experts, as the ranks of an expert axis share them."""

from __future__ import annotations

from dataclasses import replace

from ..grid.split import Direction, Split
from ..traces.trace import LayerTrace
from ..traces.work import EXPERTS, Work
from .machine import Machine


def select_expert_axis(layer: LayerTrace, ep: int) -> int:
    """Return the ranks that share a layer's experts; 1 for a layer without experts, so that it is
    priced once for all axes."""
    return ep if any(work.name == EXPERTS for work in layer.forward) else 1


def price_share(machine: Machine, work: Work, direction: Direction, split: Split, ep: int) -> float:
    """Return the seconds of a rank's share in an operation.

    A rank on an expert axis holds 1/ep of the experts, context and tensor ranks share the tokens,
    and each expert gets the tokens of all ranks on the axis. All ranks wait for the busiest.
    Without an axis, products of experts are split like others.
    """
    if work.name != EXPERTS or ep == 1:
        return machine.seconds([work], direction, split)
    groups, tokens, k, n = work.shape
    local_groups = max(1, groups // ep)
    local_tokens = round(groups * tokens * split.rows / split.ranks / local_groups)
    local = replace(work, shape=(local_groups, max(1, local_tokens), k, n))
    return machine.imbalance * machine.seconds([local], direction, Split())


def price_exchange(machine: Machine, size: float, top_k: int, ep: int) -> float:
    """Return the seconds in which rows travel to their experts and back: `size` bytes of a rank,
    `top_k` rows for each token.

    The busiest rank ends last. Its rows, sorted by expert, are copied on both ways.
    """
    size *= machine.imbalance
    seconds = machine.exposed(asynchronous=machine.program.async_experts)
    seconds *= 2 * _send_rows(machine, size, top_k, ep)
    return seconds + 2 * machine.traffic(2 * size)


def _send_rows(machine: Machine, size: float, top_k: int, ep: int) -> float:
    nodes = -(-ep // machine.per_node)
    if not machine.program.experts_by_node or nodes == 1:
        return machine.collective("all-to-all", size, ep, 1)
    # A token's experts lie on this many of the nodes, which each get the row once.
    reached = nodes * (1 - (1 - 1 / nodes) ** top_k)
    between = machine.collective("all-to-all", size * reached / top_k, nodes, machine.per_node)
    return between + machine.collective("all-to-all", size, machine.per_node, 1)
