"""A layer's operations, by the rows in a hardware file, and the seconds of both passes."""

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
"""Recompute rules that are tried for every layer."""
CALL_LAUNCHES = 50
"""Launches that take as long as torch's overhead for a recomputed call: random states, and a hook
per saved tensor. Measured on a CPU, like the next constant."""
SEEN_LAUNCHES = 2.3
"""Extra launches per operation where Python decides whether to save the result."""
EXPERTS = "experts"
"""Name of the matrix products of experts: `groups` are experts, m the tokens of each."""
Parts = dict[str, float]
"""Seconds by part."""
WorkKind = Literal["matmul", "attention", "kernel", "memory", "launch", "pairs"]


@dataclass(frozen=True)
class Work:
    """Equal operations on one row, on one rank."""

    kind: WorkKind
    name: str
    """Kernel name; of products EXPERTS, the loss's kernel, or empty; empty for other kinds."""
    shape: tuple[int, ...]
    """matmul: (groups, m, k, n); attention: (head width, heads, length, kv heads); kernel: (size,
    width, length), as in the hardware file; pairs, the query-key pairs that a ring computes in
    tiles: (head width, heads, tokens per rank); memory and launch: ()."""
    count: int
    """Number of operations; for `launch`, whatever the number of rows."""
    bytes: int
    """Bytes that one operation reads and writes."""
    saved: str = ""
    """Kind of result, as in `recompute: {save: …}`."""

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Work:
        """Build from JSON."""
        return cls(**{**data, "shape": tuple(data["shape"])})


def merge_equal(operations: Iterable[Work]) -> tuple[Work, ...]:
    """Add up equal operations. Memory traffic becomes one entry per kind of saved result, and so do
    launches."""
    counts: Counter[Work] = Counter()
    launches: Counter[str] = Counter()
    for work in operations:
        counts[replace(work, count=1)] += work.count
        launches[work.saved] += work.kind != "pairs"
    merged = [replace(work, count=n) for work, n in counts.items() if work.kind != "memory"]
    for saved, num_launches in launches.items():
        traffic = sum(
            work.bytes * n
            for work, n in counts.items()
            if work.kind == "memory" and work.saved == saved
        )
        merged.append(Work("memory", "", (), 1, traffic, saved))
        merged.append(Work("launch", "", (), num_launches, 0, saved))
    return tuple(merged)


def recompute_launches(rule: Rule, calls: int, forward_launches: int) -> float:
    """Return the launches that a recompute rule adds to the second forward pass, for a layer with
    `calls` operator calls."""
    if rule == "none":
        return 0
    if isinstance(rule, Selective):
        return CALL_LAUNCHES + 2 * SEEN_LAUNCHES * forward_launches
    return CALL_LAUNCHES * (calls if rule == "operator" else 1)


@dataclass(frozen=True)
class PassTimes:
    """Seconds that a layer takes in a micro-batch, on one rank."""

    forward: Parts
    backward: Parts
    price_recompute: Callable[[], Mapping[Rule, float]]
    """Computes `recompute_seconds`, which few layers need."""

    @cached_property
    def recompute_seconds(self) -> Mapping[Rule, float]:
        """Seconds that recompute adds to the backward pass, by rule."""
        return self.price_recompute()

    @cached_property
    def forward_seconds(self) -> float:
        return sum(self.forward.values())

    @cached_property
    def backward_seconds(self) -> float:
        """Seconds without recompute."""
        return sum(self.backward.values())
