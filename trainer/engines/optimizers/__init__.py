"""Optimizers by name. An optimizer is a file here, and a line in this table."""

from __future__ import annotations

from .adamw import AdamWConfig
from .base import OptimizerConfig

OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "adamw": AdamWConfig,
}

DEFAULT = AdamWConfig
"""The optimizer of a run that names none."""
