"""Ideas: layouts by what a person would call them.

Engines, rows and schedules of equal degrees are variants of one idea, whose prices are often nearer
to each other than to the truth. A search answers with the best plan of each idea, and goes on until
it knows the best plan with every kind of parallelism: why the best does without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..grid.grid import Grid, LayoutShape


class Idea(NamedTuple):
    """Degrees of parallelism, and the ranks that share a copy of the state (0: all)."""

    pp: int
    cp: int
    tp: int
    ep: int
    shard: int = 0

    @property
    def kinds(self) -> Iterator[str]:
        """Kinds of parallelism that a plan could do without."""
        for kind, size in zip(self._fields, self, strict=True):
            if size > 1:
                yield KINDS[kind]


KINDS: Mapping[str, str] = {"tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "shard": "HSDP"}
"""Kinds of parallelism by the degree that shows them, in the order of their lines."""


def name_shape(shape: LayoutShape, shard: int | None) -> Idea:
    layout = shape.layout
    return Idea(layout.pp, layout.cp, layout.tp, layout.ep, shard or 0)


def name_idea(grid: Grid) -> Idea:
    """Return the idea whose variant a layout is."""
    shard = grid.engine.choices(grid.layout).get("shard")
    return name_shape(grid.shape, shard if isinstance(shard, int) else None)
