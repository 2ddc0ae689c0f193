"""Engines: they hold the sharded state, compute gradients and apply them.

This is the only list of engines. An engine is a file here with an `EngineConfig` and a class that
satisfies `Engine`; the file's heavy imports are inside its functions.
"""

from __future__ import annotations

from .config import EngineConfig
from .deepspeed import DeepSpeedConfig
from .fsdp2 import Fsdp2Config

ENGINES: dict[str, type[EngineConfig]] = {
    "deepspeed": DeepSpeedConfig,
    "fsdp2": Fsdp2Config,
}
