"""Operations of a layer, by the rows of a hardware file; seconds of its passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from ....models.options.recompute import OPERATIONS, Rule, Selective, Unit

RULES: tuple[Rule, ...] = (
    *get_args(Unit),
    Selective(save=("matmul",)),
    Selective(save=("attention", "scan", "convolution")),
    Selective(save=tuple(OPERATIONS)),
)
"""Recompute rules that are tried for each layer."""
CALL_LAUNCHES = 50
"""Launches that take as long as torch's own work for a call that is recomputed: random states,
and a hook for each kept tensor. Measured on a CPU, as the next one."""
SEEN_LAUNCHES = 2.3
"""Launches that an operation costs more where Python sees it, because its result may be kept."""
Parts = dict[str, float]
"""Seconds by part."""
WorkKind = Literal["matmul", "attention", "kernel", "memory", "launch"]


@dataclass(frozen=True)
class Work:
    """Operations of one shape, for a row of one sequence on one rank."""

    kind: WorkKind
    name: str
    """Kernel of the operation; empty for the others."""
    shape: tuple[int, ...]
    """matmul: (groups, m, k, n); attention: (head width, heads, length, heads of keys); kernel:
    (size, width, length), as in the hardware file; memory and launch: ()."""
    count: int
    """Number of such operations; `launch` counts all of them, whatever the rows."""
    bytes: int
    """Bytes that one operation reads and writes."""
    saved: str = ""
    """Kind of result by the names of `recompute: {save: …}`."""


def recompute_launches(rule: Rule, calls: int, forward: int) -> float:
    """Return the launches that the rule of a layer costs beside its second forward pass, by its
    operator calls and the operations of its forward pass."""
    if rule == "none":
        return 0
    if isinstance(rule, Selective):
        return CALL_LAUNCHES + 2 * SEEN_LAUNCHES * forward
    return CALL_LAUNCHES * (calls if rule == "operator" else 1)


@dataclass(frozen=True)
class Passes:
    """A layer of one sort in a micro-batch of a rank."""

    forward: Parts
    backward: Parts
    again: Mapping[Rule, float]
    """Seconds of the backward pass that recompute adds."""

    @cached_property
    def ahead(self) -> float:
        """Seconds of the forward pass."""
        return sum(self.forward.values())

    @cached_property
    def back(self) -> float:
        """Seconds of the backward pass without recompute."""
        return sum(self.backward.values())
