"""Tables with a value per model part: layers by kind, both ends, shared modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ...models.accounting.state import Shards
from ...models.config.options.names import LinearForm
from ...trainer.accounting.state import ParameterState
from ...trainer.run.config import RunConfig
from ..grid.split import Split
from .footprints import Traces

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class PartTable(Generic[T]):
    """A value per part."""

    layers: Sequence[T]
    """By kind."""
    first: T
    """The embedding."""
    last: T
    """Final norm and head; also the embedding, if tied weights are on a separate stage."""
    modules: Mapping[str, T]
    """Shared modules by name."""

    def map(self, function: Callable[[T], S]) -> PartTable[S]:
        return PartTable(
            [function(layer) for layer in self.layers],
            function(self.first),
            function(self.last),
            {name: function(module) for name, module in self.modules.items()},
        )


class ModelParts(Protocol):
    """What the memory accounting reads from a model, headrace's or another program's."""

    def traces(self, split: Split, ep: int, linear: LinearForm) -> Traces: ...
    def input_bytes(self, split: Split) -> int:
        """Count the bytes in a micro-batch's tokens."""

    def stream_bytes(self, split: Split) -> int:
        """Count the bytes that a micro-batch sends to the next stage."""

    def parameters(self, run: RunConfig, *, by_kind: bool) -> ParameterState:
        """Return the parameters' state, for all layers or (`by_kind`) for one per kind."""

    def shards_by_part(self, pp: int, tp: int, ep: int) -> PartTable[Shards]: ...
    def shards(self, tp: int, ep: int) -> Shards:
        """Return a rank's shards, as if it had all layers."""

    def users(self, chunks: Sequence[range]) -> Mapping[str, set[int]]:
        """Return the chunks that use a module outside the blocks, by module path."""
