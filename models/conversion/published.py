"""The table of published families: what can be read, and written, and what tests it."""

from __future__ import annotations

from . import FAMILIES, ORIGINALS, vortex
from .family import Published
from .savanna import checkpoint


def list_published() -> list[Published]:
    families = [family.published for family in FAMILIES.values()]
    originals = [original.published for original in ORIGINALS.values()]
    return [*families, *originals, vortex.PUBLISHED, checkpoint.PUBLISHED]
