"""Products of experts, as the ranks of an expert axis share them."""

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
