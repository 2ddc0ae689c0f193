"""Configuration of an engine.

An engine's configuration lists what the engine holds, for the memory accounting, and builds the
engine: what that needs of torch is imported there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...models.accounting.level import EngineMemory
from ...models.accounting.state import BytesPerParameter, Degrees, Shards, StatePart
from ...models.config.options.names import Backend, LinearForm
from ...models.config.options.precision import Precision
from ..layout.config import LayoutConfig
from .optimizers.config import OptimizerConfig

if TYPE_CHECKING:
    import torch

    from ...models.model.model import Model
    from ..layout.groups import Parallel
    from .engine import Engine
    from .objective import Objective


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
    """Compile each kind of block (`se/glu`, `attention/glu`, …) with torch.compile."""
    compile_backend: Backend = "inductor"
    """inductor generates code; on CPU it needs a C++ compiler with Python's headers (`CXX` names
    another one than g++). aot_eager and eager trace the blocks and run torch's own operations: they
    are not faster, show what cannot be compiled, and need no compiler."""
    compile_fallback: bool = False
    """Run a kind of block eagerly if it cannot be compiled, or has more than 64 graphs. Otherwise
    that is an error, which names the kind and torch's reason."""

    def __post_init__(self) -> None:
        if not self.compile and (self.compile_fallback or self.compile_backend != "inductor"):
            raise ValueError("compile_backend and compile_fallback need compile: true")

    def compile_blocks(self, model: Model, device: torch.device) -> None:
        """Compile the blocks of a model that has this rank's shards, if the settings ask for it."""
        if self.compile:
            from ...models.transforms.compilation import compile_blocks

            compile_blocks(model, device, self.compile_backend, fallback=self.compile_fallback)

    @property
    def offloads(self) -> bool:
        """True if the optimizer's states lie in host memory, where the CPU updates them."""
        return False

    @property
    def linear(self) -> LinearForm:
        """The function that computes linear layers."""
        return "torch"

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

    def load(self, device: str) -> None:
        """Import what the engine imports when it is built, for ranks of this kind of device."""
        import torch._dynamo  # noqa: F401  # torch's optimizers and FSDP2 import it

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
