"""Configuration of an engine.

An engine's configuration lists what the engine holds, for the memory accounting, says what it sends
and which settings are worth a try, for the planner, and builds the engine: what that needs of torch
is imported there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from ...console.errors import LayoutError
from ...models.accounting.level import EngineMemory
from ...models.accounting.state import BytesPerParameter, Degrees, Shards, StatePart
from ...models.config.options.names import Backend, LinearForm
from ...models.config.options.precision import Precision
from ..layout.config import LayoutConfig
from .optimizers.config import OptimizerConfig
from .shard_groups import LayerShards
from .traffic import KeptWhole, Traffic

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

    chooses_layers: ClassVar[bool] = False
    """True if spans of layers may have `reshard` and `shard` of their own."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages beside torch, whose versions a run records."""

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

    @classmethod
    @abstractmethod
    def candidates(cls, shard: int | None) -> Sequence[Self]:
        """Return the settings that the planner tries with `shard` ranks that share one copy of the
        state; None: all ranks share one. An engine without such copies has none for a number."""

    @classmethod
    @abstractmethod
    def fewest_messages(cls) -> Self:
        """Return the settings that send the least: a run with them shows the engine's own work."""

    @abstractmethod
    def choices(self, layout: LayoutConfig) -> Mapping[str, object]:
        """Return the settings in which the candidates differ, by their names in `--explain`."""

    @abstractmethod
    def traffic(self, layout: LayoutConfig, device: str) -> Traffic:
        """Return the messages of a step and the engine's own work, on this kind of device."""

    @abstractmethod
    def kept_whole(self, layout: LayoutConfig) -> KeptWhole:
        """Return the weights that stay whole from a forward to the backward pass."""

    @property
    def layer_shards(self) -> tuple[LayerShards, ...]:
        """Spans of layers with `reshard` and `shard` of their own."""
        return ()

    def with_layer_shards(self, spans: Sequence[LayerShards]) -> Self:
        """Return the engine with these spans instead."""
        raise LayoutError(
            f"engine.kind={self.kind} has no `reshard` and `shard` of single layers, and layers "
            f"{list(spans[0].layers)} choose them"
        )

    @abstractmethod
    def check(self, layout: LayoutConfig, processes: int, precision: Precision) -> None:
        """Raise if the engine does not support the layout or the precision."""

    def check_compile(self, shared_block: str) -> None:
        """Raise if the engine cannot be compiled with a block that several blocks call."""
        return

    @abstractmethod
    def describe(self) -> str:
        """Return name and settings in a few words, for people."""

    def describe_in(self, layout: LayoutConfig) -> str:
        """Return `describe` with what follows from the layout."""
        return self.describe()

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
