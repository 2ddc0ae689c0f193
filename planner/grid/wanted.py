"""Settings that `--explain` requires of a layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...trainer.layout.config import LayoutConfig
from .grid import Grid, Shape

SETTINGS = ("pp", "cp", "tp", "ep", "attention", "hyena_li")
"""Settings that are fixed by a shape."""

Wanted = Mapping[str, Any]
"""Settings that a layout must have, by the names of `Grid.words`."""


def matching(grids: Iterable[Grid], required: Wanted | None) -> Iterator[Grid]:
    """Yield the grids that have the settings."""
    for grid in grids:
        if not required or all(grid.words().get(name) == value for name, value in required.items()):
            yield grid


def may_be(shape: Shape, required: Wanted | None) -> bool:
    """Return True unless the shape contradicts the required settings."""
    sizes = {"dp": shape.dp, "rows": shape.rows, "micro": shape.micro_batches}
    return _agree(sizes, required) and may_agree(shape.layout, required)


def may_agree(layout: LayoutConfig, required: Wanted | None) -> bool:
    """Return True unless the layout contradicts the required settings."""
    return _agree({name: getattr(layout, name) for name in SETTINGS}, required)


def _agree(known: Wanted, required: Wanted | None) -> bool:
    return not required or all(known.get(name, value) == value for name, value in required.items())
