"""Tile size for ring attention in plain torch."""

TILE = 256
"""Queries whose scores are in memory at once."""
