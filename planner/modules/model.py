"""A sequence of foreign modules, in the form of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ..traces.trace import ModelTrace
from ..traces.work import Work

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig


@dataclass(frozen=True)
class ModuleKind:
    """Modules with equal text and equal input shapes."""

    name: str
    text: str
    """Module as torch prints it."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes."""
    input: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.parameters)


@dataclass(frozen=True)
class ModuleModel:
    """Modules as a model: cut into stages and sharded over data-parallel ranks, without tokens or
    operators that divide.

    Plans hash the fields with their names (`model_hash`), here and in `ModuleKind`.
    """

    module: str
    """package:function."""
    sorts: tuple[ModuleKind, ...]
    layers: tuple[int, ...]
    """Kinds by module."""
    operators: Mapping[str, Any] = field(default_factory=dict)
    """Always empty: no operator has heads or experts."""
    tie_embeddings: bool = False
    vocab_size: int = 1

    @property
    def layer_kinds(self) -> list[ModuleKind]:
        """Kinds by module."""
        return [self.sorts[number] for number in self.layers]

    def tp_problems(self, tp: int) -> list[str]:
        return [] if tp == 1 else [f"tp={tp}: {self.module} has no tensor parallelism"]

    def ep_problems(self, ep: int, tp: int, ranks: int) -> list[str]:
        return [] if ep == 1 else [f"ep={ep}: {self.module} has no experts that are split"]


@dataclass(frozen=True)
class TracedModules:
    """Modules from `package:function`, with their operations."""

    model: ModuleModel
    trace: ModelTrace

    @property
    def config(self) -> ModelConfig:
        """The modules in place of a model's configuration: the planner asks both for their layers
        and for problems of degrees."""
        return cast("ModelConfig", self.model)

    @property
    def names(self) -> list[str]:
        """Names by module."""
        return [kind.name for kind in self.model.layer_kinds]


def count_flops(operations: tuple[Work, ...]) -> float:
    """Count the FLOP of matrix products, convolutions and attention."""
    flops = 0.0
    for work in operations:
        if work.kind == "matmul":
            flops += 2.0 * math.prod(work.shape) * work.count
        elif work.kind == "attention":
            width, heads, length, _ = work.shape
            flops += 2.0 * length**2 * heads * width * work.count
    return flops
