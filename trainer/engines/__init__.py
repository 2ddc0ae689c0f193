"""Engines: they hold the sharded state, compute gradients and apply them.

This is the only list of engines. An engine is a file here with an `EngineConfig` and a class that
satisfies `Engine`; the file's heavy imports are inside its functions.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..checkpoints.fragments import begin_averages, masters
from .deepspeed import DeepSpeedConfig
from .engine import Engine, EngineConfig
from .fsdp2 import Fsdp2Config

ENGINES: dict[str, type[EngineConfig]] = {
    "deepspeed": DeepSpeedConfig,
    "fsdp2": Fsdp2Config,
}


def give(engine: Engine, weights: Mapping[str, Tensor]) -> None:
    """Fill a new engine with weights. It reads whole tensors one after the other, and only those
    of which the rank holds a range: no rank holds more than one beside its shards."""
    fragments = engine.fragments()
    for fragment in masters(fragments):
        fragment.take(weights[fragment.parameter])
    begin_averages(fragments)
    engine.loaded(0)
