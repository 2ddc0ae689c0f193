"""What every operator is: options read from YAML, and a module that maps x to x."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..documents import Documents
from ..initializers import Initialiser
from ..kernels.choice import Kernel
from ..parallel.axes import ALONE, Axes
from ..parallel.sharding import ShardingSpec


@dataclass(frozen=True, kw_only=True)
class OperatorOptions:
    """The options of one operator; `kind` is its name in the registry."""

    kind: str

    def problems(self, width: int) -> Iterator[str]:
        """What is wrong with these options at this model width, with the numbers."""
        yield from ()

    def shares(self, width: int) -> dict[str, int]:
        """What tensor parallelism must divide evenly, by name."""
        return {}

    @property
    def attention_heads(self) -> int | None:
        """Of queries, where it has attention. Context parallelism by a2a deals them out."""
        return None


@dataclass(frozen=True, kw_only=True)
class FusedOptions(OperatorOptions):
    """Of an operator for which there are fused kernels."""

    kernel: Kernel = "auto"
    """`auto`: fused kernels on a GPU, and plain torch, with a warning, for what they cannot do.
    `triton` refuses that instead; `torch` takes none. All compute the same. (Generation, token by
    token, is plain torch.)"""


@dataclass
class State:
    """What an operator keeps between calls: constant-size states, or a cache of keys and values."""

    capacity: int
    """The longest sequence that caches must hold."""
    seen: int = 0
    """Tokens that have already passed."""
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Context:
    """What an operator may know beside its input."""

    positions: Tensor
    """int64 [rows or 1, length]: of each token in its document, for position embeddings."""
    documents: Documents | None = None
    """None: each row is one document."""
    state: State | None = None
    """Read and updated where given: generation."""
    rows: Tensor | None = None
    """bool [rows]: those that are rows of text. The others fill the batch up, and nothing that is
    counted over a batch may see them. None: all."""
    embeddings: Tensor | None = None
    """What came out of the embedding, for shared blocks."""
    adapters: Any = None
    """What the present call of a shared block has of its own."""
    axes: Axes = field(default_factory=Axes)
    """Among which processes the operator is divided."""
    losses: list[Tensor] = field(default_factory=list)
    """Auxiliary losses are added here by those who have one."""

    def whole(self, length: int) -> Context:
        """The same for whole rows, for those who gather them; `length` is that of our part."""
        axis = self.axes.context
        if axis.size == 1:
            return self
        if self.documents is None:
            documents = None
            positions = torch.arange(length * axis.size, device=self.positions.device).unsqueeze(0)
        else:
            assert self.documents.whole is not None, "a part's documents know those of its rows"
            documents, positions = self.documents.whole, self.documents.whole.positions
        axes = replace(self.axes, context=ALONE)
        return replace(self, positions=positions, documents=documents, axes=axes)


class Operator(nn.Module, ABC):
    """Maps x [rows, length, width] to the same shape, given a Context.

    Forward passes take sizes from their weights, so that a tensor-parallel layout can put a part
    of the heads or channels in their place. The output is then to be summed over the axis.
    """

    Options: ClassVar[type[OperatorOptions]]
    tokenwise: ClassVar[bool] = False
    """Whether each token is mapped by itself, so that no state is carried along."""
    once: ClassVar[tuple[str, ...]] = ()
    """Children that run once for a batch, such as the network behind a filter."""
    undecayed: ClassVar[tuple[str, ...]] = ()
    """Parameters that weight decay must leave alone though they have several dimensions: rates,
    gains and biases of each channel, which a pull towards 0 would not make smaller but other."""

    def __init__(self, options: Any, width: int) -> None:
        super().__init__()
        self.options = options
        self.width = width

    @abstractmethod
    def forward(self, x: Tensor, context: Context) -> Tensor: ...

    @abstractmethod
    def init_weights(self, init: Initialiser) -> None: ...

    @abstractmethod
    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """How tensor parallelism divides the parameters among so many processes."""

    def layouts(self, length: int) -> set[int]:
        """The chunks in whose layouts it wants packed rows of this length."""
        return set()

    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Return the parameters [stack, rows, columns] that are projections beside those of linear
        layers, by name, with the rows of each projection, one behind the other."""
        return {}

    def flops(self, length: int) -> dict[str, float]:
        """Forward floating-point operations for each token, by part, at this sequence length.

        Only what is not a matrix product with a weight: those are counted from the module.
        """
        return {}

    def step_flops(self, seen: int) -> dict[str, float]:
        """The same for one token of generation, after `seen` others."""
        return self.flops(seen)


class Call(nn.Module, ABC):
    """One call of a shared operator: `forward(operator, x, context)` with weights of its own.

    What comes in and goes out is a part of every sequence, where tensor parallelism divides them.
    """

    @abstractmethod
    def forward(self, operator: nn.Module, x: Tensor, context: Context) -> Tensor: ...

    @abstractmethod
    def init_weights(self, init: Initialiser) -> None: ...

    @abstractmethod
    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """How tensor parallelism divides the parameters among so many processes."""


class SharedOperator(Operator):
    """Feeds other layers, with one set of weights for all of its calls. It takes and gives parts
    of sequences, as its calls do."""

    @abstractmethod
    def new_call(self) -> Call:
        """What one call has of its own."""


def divides(what: str, number: int, into_what: str, total: int) -> Iterator[str]:
    """A problem unless `number` is positive and divides `total`."""
    if number < 1 or total % number:
        yield f"{what} ({number}) does not divide {into_what} ({total})"
