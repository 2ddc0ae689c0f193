"""Operations of a layer, by the rows of a hardware file; seconds of its passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from ...models.config.options.recompute import OPERATIONS, Rule, Selective, Unit

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
WorkKind = Literal["matmul", "attention", "kernel", "memory", "launch", "pairs"]


@dataclass(frozen=True)
class Work:
    """Operations of one shape, for a row of one sequence on one rank."""

    kind: WorkKind
    name: str
    """Kernel of the operation; empty for the others."""
    shape: tuple[int, ...]
    """matmul: (groups, m, k, n); attention: (head width, heads, length, heads of keys); kernel:
    (size, width, length), as in the hardware file; pairs of queries and keys that a ring computes
    in tiles: (head width, heads, tokens of a rank); memory and launch: ()."""
    count: int
    """Number of such operations; `launch` counts all of them, whatever the rows."""
    bytes: int
    """Bytes that one operation reads and writes."""
    saved: str = ""
    """Kind of result by the names of `recompute: {save: …}`."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Work:
        return cls(**{**data, "shape": tuple(data["shape"])})


def counted(work: Iterable[Work]) -> tuple[Work, ...]:
    """Add up equal operations. Traffic without a shape is one entry for each kind of saved result,
    and so are launches."""
    alike: Counter[Work] = Counter()
    launches: Counter[str] = Counter()
    for each in work:
        alike[replace(each, count=1)] += each.count
        launches[each.saved] += each.kind != "pairs"
    rest = [replace(each, count=n) for each, n in alike.items() if each.kind != "memory"]
    for kind, count in launches.items():
        moved = [e.bytes * n for e, n in alike.items() if e.kind == "memory" and e.saved == kind]
        rest.append(Work("memory", "", (), 1, sum(moved), kind))
        rest.append(Work("launch", "", (), count, 0, kind))
    return tuple(rest)


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
    """A layer of one kind in a micro-batch of a rank."""

    forward: Parts
    backward: Parts
    repeat: Callable[[], Mapping[Rule, float]]
    """Makes `again`: few of all passes need it."""

    @cached_property
    def again(self) -> Mapping[Rule, float]:
        """Seconds of the backward pass that recompute adds."""
        return self.repeat()

    @cached_property
    def ahead(self) -> float:
        """Seconds of the forward pass."""
        return sum(self.forward.values())

    @cached_property
    def back(self) -> float:
        """Seconds of the backward pass without recompute."""
        return sum(self.backward.values())
