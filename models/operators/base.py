"""Base of all operators: options read from YAML, and a module that maps x to x."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..config.options.base import FusedOptions, OperatorOptions
from ..documents import Documents
from ..kernels.choice import requests_kernel
from ..kernels.fp8 import Quantized
from ..layers.initializers import Initializers
from ..layers.recompute import Recomputable
from ..parallel.axes import ALONE, Axes
from ..parallel.local_shard import ShardingSpec


@dataclass
class State:
    """State of an operator between calls: constant-size states, or a cache of keys and values."""

    capacity: int
    """Length of the longest sequence that caches must hold."""
    seen: int = 0
    """Number of tokens already processed."""
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchContext:
    """Inputs of an operator besides x: of the whole forward pass, and of one call."""

    positions: Tensor
    """int64 [rows or 1, length]: position of each token in its document (RoPE, learned)."""
    documents: Documents | None = None
    """Documents packed into the rows; None: each row is one document."""
    rows: Tensor | None = None
    """bool [rows]: True for rows of text. Statistics over a micro-batch (MoE routers) leave out
    padding rows. None: all rows are text."""
    embeddings: Tensor | None = None
    """Output of the embedding, for shared blocks; None if the model has none."""
    axes: Axes = field(default_factory=Axes)
    """Tensor-parallel and context-parallel axes."""
    state: State | None = None
    """Per call: the operator's state in generation, read and updated."""
    adapters: Any = None
    """Per call: the weights that a call of a shared block adds (LoRA)."""
    stored: Quantized | None = None
    """Per call: x in FP8, if the norm before it stored it so."""
    losses: list[Tensor] = field(default_factory=list)
    """Per call: operators append their auxiliary losses here, [rows]."""
    received: list[int] = field(default_factory=list)
    """Rows that this rank's experts received from all ranks: a number for each call of an operator
    with experts, those of recomputation included; 0 without expert parallelism."""
    routed: list[Tensor] | None = None
    """Tokens of text that each expert gets, [experts]: operators append them if it is a list."""

    def call_context(self, state: State | None, axes: Axes | None = None) -> BatchContext:
        """Return the context of one operator call, with an empty list of losses."""
        return replace(self, state=state, losses=[], axes=axes or self.axes)

    def whole_row_context(self, length: int) -> BatchContext:
        """Return the context of whole rows, for operators that gather them over the context axis.
        `length` is that of this rank's part of a row."""
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
    """Maps x [rows, length, width] to the same shape, given a BatchContext.

    Forward passes take sizes from their weights, so that tensor parallelism can replace the
    weights by local shards. The outputs must then be summed over the axis.
    """

    Options: ClassVar[type[OperatorOptions]]
    once: ClassVar[tuple[str, ...]] = ()
    """Child modules that run once for a batch, such as the network that computes a filter."""
    no_decay: ClassVar[tuple[str, ...]] = ()
    """Parameters without weight decay although they have several dimensions: rates, gains and
    biases of channels. A pull towards 0 would change the function, not make it smaller."""
    full_precision: ClassVar[tuple[str, ...]] = ()
    """Parameters that are fp32 beside bf16 weights: rates, decays and residues. A scan applies them
    thousands of times, so their rounding would grow."""

    experts: ClassVar[tuple[str, ...]] = ()
    """Parameters whose dimension 0 counts experts: expert parallelism shards them."""

    def __init__(self, options: Any, width: int) -> None:
        super().__init__()
        self.options = options
        self.width = width

    def axes(self, axes: Axes) -> Axes:
        """Return the axes over which this operator is sharded, among those of the model."""
        return axes.share_rows() if self.experts and axes.experts.size > 1 else axes

    @abstractmethod
    def forward(self, x: Tensor, batch: BatchContext) -> Tensor: ...

    @abstractmethod
    def init_weights(self, init: Initializers) -> None: ...

    @abstractmethod
    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Return how parameters are sharded over this number of tensor-parallel ranks."""

    def fused(self, device: torch.device) -> bool:
        """Return True if the options request fused kernels on this device."""
        return isinstance(self.options, FusedOptions) and requests_kernel(
            self.options.kernel, device
        )

    def untraced(self, axes: Axes, device: torch.device) -> str | None:
        """Return the part of a call that torch.compile cannot trace with these axes, or None."""
        return None

    def packing_chunks(self, length: int) -> set[int]:
        """Return the chunk sizes to which plain torch aligns packed rows of this length."""
        return set()

    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Return, by name, parameters [stack, rows, columns] that hold projections outside linear
        layers: the rows of each of the concatenated projections."""
        return {}

    def unused_parameters(self) -> int:
        """Return the number of parameters that one token does not use."""
        return 0

    def flops(self, length: int) -> dict[str, float]:
        """Return forward FLOPs per token at this sequence length, by name of a computation.

        Matrix products with weights are left out: they are counted from the module.
        """
        return {}

    def step_flops(self, seen: int) -> dict[str, float]:
        """Return FLOPs for one generated token, after `seen` tokens."""
        return self.flops(seen)


class SharedCall(Recomputable, ABC):
    """One call of a shared operator: `forward(operator, x, batch)`, with weights of this call.

    Under tensor parallelism, input and output are this rank's part of each sequence.
    """

    @abstractmethod
    def forward(self, operator: nn.Module, x: Tensor, batch: BatchContext) -> Tensor: ...

    @abstractmethod
    def init_weights(self, init: Initializers) -> None: ...

    @abstractmethod
    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Return how parameters are sharded over this number of tensor-parallel ranks."""


class SharedOperator(Operator):
    """Feeds other layers, with one set of weights for all of its calls. Input and output are parts
    of sequences, as those of its calls."""

    @abstractmethod
    def new_call(self) -> SharedCall:
        """Return the weights of one call."""
