"""Settings that `--explain` requires of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...trainer.layout.config import LayoutConfig
from .grid import LayoutShape

SHAPE_SETTINGS = ("pp", "cp", "tp", "ep", "attention", "hyena_li", "delta")
"""Settings that a shape fixes."""

Settings = Mapping[str, Any]
"""Values by name, as in `Grid.settings`."""


def has_settings(known: Settings, required: Settings) -> bool:
    return all(known.get(name) == value for name, value in required.items())


def may_match_shape(shape: LayoutShape, settings: Settings | None) -> bool:
    """Return False if the shape contradicts the settings."""
    sizes = {"dp": shape.dp, "rows": shape.rows, "micro": shape.micro_batches}
    return _may_match(sizes, settings) and may_match_layout(shape.layout, settings)


def may_match_layout(layout: LayoutConfig, settings: Settings | None) -> bool:
    """Return False if the layout contradicts the settings."""
    return _may_match({name: getattr(layout, name) for name in SHAPE_SETTINGS}, settings)


def _may_match(known: Settings, settings: Settings | None) -> bool:
    return not settings or all(known.get(name, value) == value for name, value in settings.items())
