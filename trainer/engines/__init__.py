"""Engines: what turns gradients into updates, and who holds which part of the state.

This is the one place that knows them by name. An engine is a file here with a configuration and
a class that satisfies `Engine`; the file's heavy imports are inside its functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .deepspeed import DeepSpeedConfig
from .fsdp2 import Fsdp2Config

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.precision import Precision
    from ..layout.groups import Parallel
    from .engine import Engine
    from .objective import Objective
    from .optimizers.base import OptimizerConfig

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
    """The engine of an objective that stands on the meta device, divided. What it trains has no
    values until it is given them: by `give`, or by a checkpoint."""
    return config.build(objective, optimizer, precision, parallel)


def give(engine: Engine, weights: Mapping[str, Tensor]) -> None:
    """Give a new engine its weights. Of whole tensors it asks for those that it has a part of, one
    after the other, so that a process holds no more than one beside its part."""
    from ..checkpoints.fragments import masters

    for fragment in masters(engine.fragments()):
        fragment.take(weights[fragment.parameter])
    engine.loaded(0)
