"""Size of the blocks of ring attention where no kernel computes it."""

TILE = 256
"""Number of queries whose scores are in memory at once."""
