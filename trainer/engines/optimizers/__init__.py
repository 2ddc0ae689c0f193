"""Optimizers by name. An optimizer is a file here, and a line in this table."""

from __future__ import annotations

from .adamw import AdamWConfig
from .config import OptimizerConfig
from .muon import MuonConfig

OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "adamw": AdamWConfig,
    "muon": MuonConfig,
}

DEFAULT = AdamWConfig
"""The optimizer of a run that names none."""
