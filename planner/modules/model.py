"""Foreign modules (another program's) in place of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ...trainer.run.layout_plan import hash_identity
from ..traces.trace import ModelTrace
from ..traces.work import Work

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig


@dataclass(frozen=True)
class ModuleKind:
    """Modules with equal descriptions, parameters and input shapes."""

    name: str
    description: str
    """Module as torch prints it."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes."""
    input_shape: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.parameters)


@dataclass(frozen=True)
class ModuleModel:
    """Modules as a model: stages cut it and data-parallel ranks shard it, nothing else does."""

    module: str
    """package:function."""
    kinds: tuple[ModuleKind, ...]
    layers: tuple[int, ...]
    """Index in `kinds`, by module."""
    operators: Mapping[str, Any] = field(default_factory=dict)
    """Always empty: no operator has heads or experts."""
    tie_embeddings: bool = False
    vocab_size: int = 1

    @property
    def layer_kinds(self) -> list[ModuleKind]:
        """Kind by module."""
        return [self.kinds[number] for number in self.layers]

    def identity(self) -> dict[str, Any]:
        """Return the settings as plans hash them, under keys that never change."""
        return {
            "module": self.module,
            "sorts": [
                {
                    "name": kind.name,
                    "text": kind.description,
                    "parameters": kind.parameters,
                    "input": kind.input_shape,
                }
                for kind in self.kinds
            ],
            "layers": self.layers,
            "operators": self.operators,
            "tie_embeddings": self.tie_embeddings,
            "vocab_size": self.vocab_size,
        }

    def tp_problems(self, tp: int) -> list[str]:
        return [] if tp == 1 else [f"tp={tp}: {self.module} has no tensor parallelism"]

    def ep_problems(self, ep: int, tp: int, ranks: int) -> list[str]:
        return [] if ep == 1 else [f"ep={ep}: {self.module} has no experts that are split"]


@dataclass(frozen=True)
class TracedModules:
    """Modules from `package:function`, with traced operations."""

    model: ModuleModel
    trace: ModelTrace

    @property
    def config(self) -> ModelConfig:
        """The modules in place of a model's configuration: the planner reads layers and checks
        degrees on both."""
        return cast("ModelConfig", self.model)

    @property
    def hash(self) -> str:
        """Hash in a plan file, in place of a model's."""
        return hash_identity(self.model.identity())

    @property
    def names(self) -> list[str]:
        """Name by module."""
        return [kind.name for kind in self.model.layer_kinds]


def count_flops(operations: tuple[Work, ...]) -> float:
    """Count the FLOP in matrix products, convolutions and attention."""
    flops = 0.0
    for work in operations:
        if work.kind == "matmul":
            flops += 2.0 * math.prod(work.shape) * work.count
        elif work.kind == "attention":
            width, heads, length, _ = work.shape
            flops += 2.0 * length**2 * heads * width * work.count
    return flops
