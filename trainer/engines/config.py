"""Base class for engine configurations.

A configuration lists the engine's state for the memory accounting, and messages and candidate
settings for the planner; it builds the engine, and imports torch only then.
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
from .traffic import Traffic, UnshardedWeights

if TYPE_CHECKING:
    import torch

    from ...models.model.model import Model
    from ..layout.groups import Parallel
    from .engine import Engine
    from .objective import Objective


@dataclass(frozen=True, kw_only=True)
class StateOnDevice:
    """An engine's state and device, for the memory over a step."""

    parts: Sequence[StatePart]
    precision: Precision
    layout: LayoutConfig
    device: str
    """Kind: cuda or cpu."""
    fp32: Collection[str]
    """Parameters that stay fp32 in a model of half precision: no engine shards them."""
    groups: Sequence[Sequence[str]]
    """Parameter names, by optimizer group."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ABC):
    """Settings for an engine. `build` imports the engine's packages."""

    chooses_layers: ClassVar[bool] = False
    """True if spans of layers may have separate `reshard` and `shard`."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages besides torch, whose versions a run records."""

    kind: str
    compile: bool = False
    """Compile each kind of block (`se/glu`, `attention/glu`, …) with torch.compile."""
    compile_backend: Backend = "inductor"
    """inductor generates code; on CPU it needs a C++ compiler with Python's headers (`CXX` names
    another than g++). aot_eager and eager trace the blocks and run torch's own operations: they
    are not faster, show what cannot be compiled, and need no compiler."""
    compile_fallback: bool = False
    """Run a kind of block eagerly if it cannot be compiled, or has more than 64 graphs. Otherwise
    this is an error, which names the kind and torch's reason."""

    def __post_init__(self) -> None:
        if not self.compile and (self.compile_fallback or self.compile_backend != "inductor"):
            raise ValueError("compile_backend and compile_fallback need compile: true")

    def compile_blocks(self, model: Model, device: torch.device) -> None:
        """Compile a sharded model's blocks, if configured."""
        if self.compile:
            from ...models.transforms.compilation import compile_blocks

            compile_blocks(model, device, self.compile_backend, fallback=self.compile_fallback)

    @property
    def offloads(self) -> bool:
        """True if optimizer states are in host memory, where the CPU updates them."""
        return False

    def offloading(self) -> EngineConfig | None:
        """Return the settings with the optimizer in host memory; None if the engine cannot."""
        return None

    @property
    def linear(self) -> LinearForm:
        """Function for linear layers."""
        return "torch"

    def for_ranks(self, ranks: int) -> EngineConfig:
        """Return the settings with the defaults for `ranks` ranks that share the state (dp × cp).
        They are of this start, and no file keeps them: another start may have more ranks."""
        return self

    @classmethod
    @abstractmethod
    def candidates(cls, shard: int | None, *, alone: bool) -> Sequence[Self]:
        """Return the settings that the planner tries if `shard` ranks share a copy of the state
        (None: all ranks), or a rank holds it `alone`: then those that `for_ranks` keeps apart, and
        none if another engine has them. An engine that cannot have several copies returns none for
        a number."""

    @classmethod
    @abstractmethod
    def fewest_messages(cls) -> Self:
        """Return the settings with the fewest messages, to measure the engine's host work."""

    @property
    def is_special_case(self) -> bool:
        """True if another candidate runs the same where its layers choose so: the planner tries it
        only if it is asked for settings."""
        return False

    @abstractmethod
    def choices(self, layout: LayoutConfig) -> Mapping[str, object]:
        """Return the settings in which candidates differ, by name in `--explain`."""

    @abstractmethod
    def traffic(self, layout: LayoutConfig, device: str) -> Traffic:
        """Return a step's messages and the engine's host work, on this kind of device."""

    @abstractmethod
    def unsharded_weights(self, layout: LayoutConfig) -> UnshardedWeights:
        """Return which weights stay unsharded between forward and backward pass."""

    @property
    def layer_shards(self) -> tuple[LayerShards, ...]:
        """Spans of layers with separate `reshard` and `shard`."""
        return ()

    def replace_layer_shards(self, spans: Sequence[LayerShards]) -> Self:
        """Return a copy with these spans."""
        raise LayoutError(
            f"engine.kind={self.kind} has no `reshard` and `shard` of single layers, and layers "
            f"{list(spans[0].layers)} choose them"
        )

    @abstractmethod
    def check(self, layout: LayoutConfig, processes: int, precision: Precision) -> None:
        """Raise if the engine does not support the layout or the precision."""

    def check_compile(self, shared_block: str) -> None:
        """Raise if the engine cannot compile a block that several blocks call."""
        return

    @abstractmethod
    def describe(self) -> str:
        """Return name and settings in a few words, for people."""

    def describe_with_layout(self, layout: LayoutConfig) -> str:
        """Return `describe` and defaults that depend on the layout."""
        return self.describe()

    @abstractmethod
    def state_layout(
        self,
        precision: Precision,
        optimizer_bytes: BytesPerParameter,
        device: str,
        layout: LayoutConfig,
    ) -> list[StatePart]:
        """Return the parts of a rank's state, for the memory accounting."""

    @abstractmethod
    def memory(self, state: StateOnDevice, shards: Shards, degrees: Degrees) -> EngineMemory:
        """Return the memory events in a step, for a rank with these shards."""

    def load(self, device: str) -> None:
        """Import what `build` imports on this kind of device."""
        import torch._dynamo  # noqa: F401  # torch's optimizers and FSDP2 import it

    @abstractmethod
    def build(
        self,
        objective: Objective,
        optimizer: OptimizerConfig,
        precision: Precision,
        parallel: Parallel,
    ) -> Engine:
        """Build the engine from an objective on the meta device, sharded for tensor parallelism.
        Weights have no values until `load_weights` or a checkpoint fills them."""
