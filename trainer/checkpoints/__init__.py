"""Checkpoints: one format for all engines and layouts, committed atomically."""
