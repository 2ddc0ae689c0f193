"""The interface between the loop and an engine.

An engine is built from an objective on the meta device. It allocates this rank's state without
values; the caller fills the state through `fragments()` before the first step.

    for micro-batch:  sums = engine(…);  engine.backward(sums.total / weight, last=…)
    update(engine, lr)                   # update.py, the same for all engines

Gradients of all micro-batches and ranks are *summed*: the loop has divided the loss by the
weight of the global batch. An engine that averages gradients multiplies by the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...models.accounting.state import BytesPerParameter, Degrees, Shards, StatePart
from ...models.compilation import compile_blocks
from ...models.model import Model
from ...models.options.names import Backend
from ...models.options.precision import Precision
from ..checkpoints.fragments import Fragment
from ..layout.config import LayoutConfig
from ..layout.groups import Parallel
from .objective import Objective, Sums
from .optimizers.base import Optimizer, OptimizerConfig

if TYPE_CHECKING:
    from ...models.accounting.level import EngineMemory


class Engine(Protocol):
    objective: Objective
    optimizer: Optimizer
    device: torch.device
    dtype: torch.dtype
    """Number format of the residual stream."""
    clip: float
    """Limit of the norm of all gradients; 0: no limit."""
    average: float | None
    """Decay of the moving average of the weights; None: there is none."""
    updates: int
    """Optimizer steps applied since the run began."""

    def __call__(self, *inputs: Any) -> Sums:
        """Run the objective's forward pass."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of one micro-batch; `last` is the last of an optimizer step."""

    def gradients(self) -> list[Fragment]:
        """Return the shards of the summed gradients that this rank applies: live memory. Parameters
        with copies are not yet summed over them. Call after the last backward pass."""

    def step(self, lr: float, finite: torch.Tensor) -> None:
        """Apply the gradients and clear them. Where `finite`, a bool on the device, is False, clear
        them and change nothing else."""

    def discard(self) -> None:
        """Clear the gradients and change nothing else."""

    def fragments(self) -> list[Fragment]:
        """Return this rank's masters and optimizer states: live memory, to save and to load."""

    def loaded(self, steps: int) -> None:
        """Update all that follows from the fragments, after they were written to."""


@dataclass(frozen=True, kw_only=True)
class StateOnDevice:
    """State of an engine, and where it runs, for its memory over a step."""

    parts: Sequence[StatePart]
    precision: Precision
    layout: LayoutConfig
    device: str
    """Kind of device: cuda or cpu."""
    fp32: Collection[str]
    """Parameters that are fp32 beside weights of half precision: no engine shards them."""
    groups: Sequence[Sequence[str]]
    """Names of the parameters in each of the optimizer's groups."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ABC):
    """Settings of an engine. The class of an engine imports its packages in `build`."""

    kind: str
    compile: bool = False
    """Compile each kind of block with torch.compile."""
    compile_backend: Backend = "inductor"
    """inductor generates code; it needs a C++ compiler on CPU. aot_eager and eager trace the blocks
    and run torch's own operations: they show what cannot be compiled, and need no compiler."""
    compile_fallback: bool = False
    """Run a kind of block eagerly if it cannot be compiled, or is compiled too often. Otherwise
    that is an error."""

    def __post_init__(self) -> None:
        if not self.compile and (self.compile_fallback or self.compile_backend != "inductor"):
            raise ValueError("compile_backend and compile_fallback need compile: true")

    def compile_blocks(self, model: Model, device: torch.device) -> None:
        """Compile the blocks of a model that has this rank's shards, if the settings ask for it."""
        if self.compile:
            compile_blocks(model, device, self.compile_backend, fallback=self.compile_fallback)

    @property
    def offloads(self) -> bool:
        """True if the optimizer's states lie in host memory, where the CPU updates them."""
        return False

    @abstractmethod
    def check(self, layout: LayoutConfig, processes: int, precision: Precision) -> None:
        """Raise if the engine does not support the layout or the precision."""

    @abstractmethod
    def describe(self) -> str:
        """Return name and settings in a few words, for people."""

    @abstractmethod
    def state_layout(
        self,
        precision: Precision,
        optimizer_bytes: BytesPerParameter,
        device: str,
        layout: LayoutConfig,
    ) -> list[StatePart]:
        """Return the parts of the state that a rank holds, for the memory accounting."""

    @abstractmethod
    def memory(self, state: StateOnDevice, shards: Shards, degrees: Degrees) -> EngineMemory:
        """Return the events of a step in the memory of the rank that has these shards."""

    @abstractmethod
    def build(
        self,
        objective: Objective,
        optimizer: OptimizerConfig,
        precision: Precision,
        parallel: Parallel,
    ) -> Engine:
        """Return the engine of an objective on the meta device, sharded for tensor parallelism. Its
        weights have no values until `give` or a checkpoint fills them."""
