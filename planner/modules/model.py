"""A sequence of modules that are not ours, as the planner needs it."""

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
    """Modules that are alike: of one text, with inputs of one shape."""

    name: str
    text: str
    """Module as torch prints it."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes."""
    input: tuple[int, ...]

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.parameters)


@dataclass(frozen=True)
class ModuleModel:
    """A sequence of modules as the planner sees a model: it can be cut into stages and sharded over
    data-parallel ranks, and has neither operators that divide nor tokens."""

    module: str
    """package:function."""
    kinds: tuple[ModuleKind, ...]
    layers: tuple[int, ...]
    """Kind of each module."""
    operators: Mapping[str, Any] = field(default_factory=dict)
    """None: no operator has heads or experts."""
    tie_embeddings: bool = False
    vocab_size: int = 1

    def tp_problems(self, tp: int) -> list[str]:
        return [] if tp == 1 else [f"tp={tp}: {self.module} has no tensor parallelism"]

    def ep_problems(self, ep: int, tp: int, ranks: int) -> list[str]:
        return [] if ep == 1 else [f"ep={ep}: {self.module} has no experts that are split"]


@dataclass(frozen=True)
class Traced:
    """Modules of `package:function`, as the planner needs them."""

    model: ModuleModel
    trace: ModelTrace

    @property
    def config(self) -> ModelConfig:
        """The model as the planner takes it: it asks for layers and for degrees that divide it."""
        return cast("ModelConfig", self.model)

    @property
    def names(self) -> list[str]:
        """Name of each module."""
        return [self.model.kinds[kind].name for kind in self.model.layers]


def flops(work: tuple[Work, ...]) -> float:
    """Return the operations of matrix products, convolutions and attention."""
    found = 0.0
    for each in work:
        if each.kind == "matmul":
            found += 2.0 * math.prod(each.shape) * each.count
        elif each.kind == "attention":
            width, heads, length, _ = each.shape
            found += 2.0 * length**2 * heads * width * each.count
    return found
