"""Engines: they hold the sharded state, compute gradients and apply them.

This is the only list of engines. An engine is a file here with a configuration and a class that
satisfies `Engine`; the file's heavy imports are inside its functions.
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
    """Return the engine of an objective on the meta device, sharded for tensor parallelism. Its
    weights have no values until `give` or a checkpoint fills them."""
    return config.build(objective, optimizer, precision, parallel)


def give(engine: Engine, weights: Mapping[str, Tensor]) -> None:
    """Fill a new engine with weights. It reads whole tensors one after the other, and only those
    of which the rank holds a range: no rank holds more than one beside its shards."""
    from ..checkpoints.fragments import masters

    for fragment in masters(engine.fragments()):
        fragment.take(weights[fragment.parameter])
    engine.loaded(0)
