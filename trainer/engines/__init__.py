"""Engines: what turns gradients into updates, and who holds which part of the state.

This is the one place that knows them by name. An engine is a file here with a configuration and
a class that satisfies `Engine`; the file's heavy imports are inside its functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .deepspeed import DeepSpeedConfig
from .fsdp2 import Fsdp2Config

if TYPE_CHECKING:
    from ..layout import Parallel
    from ..objective import Objective
    from ..optimizer import OptimizerConfig
    from .engine import Engine, Precision

EngineConfig = DeepSpeedConfig | Fsdp2Config

ENGINES: dict[str, type[DeepSpeedConfig] | type[Fsdp2Config]] = {
    "deepspeed": DeepSpeedConfig,
    "fsdp2": Fsdp2Config,
}


def build(
    config: EngineConfig,
    objective: Objective,
    optimizer: OptimizerConfig,
    precision: Precision,
    parallel: Parallel,
) -> Engine:
    """The engine, with the objective's fp32 weights as its masters."""
    return config.build(objective, optimizer, precision, parallel)
