"""Operator base class: options read from YAML, and a module that maps x to the same shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..config.options.base import FusedOptions, OperatorOptions
from ..documents import Documents
from ..kernels.choice import requests_kernel
from ..kernels.fp8 import Quantized
from ..kernels.op import is_watched
from ..layers.attention.limits import AttentionCall
from ..layers.initializers import Initializers
from ..layers.recompute import Recomputable
from ..parallel.axes import ALONE, Axes
from ..parallel.local_shard import ShardingSpec

T = TypeVar("T")


@dataclass
class State:
    """Operator state between calls: constant-size states, or a KV cache."""

    capacity: int
    """Maximal sequence length in caches."""
    seen: int = 0
    """Tokens already processed."""
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchContext:
    """Operator inputs besides x: for the whole forward pass, and for a call."""

    positions: Tensor
    """int64 [rows or 1, length]: token positions in their documents (RoPE, learned)."""
    documents: Documents | None = None
    """Documents packed into the rows; None: each row is one document."""
    rows: Tensor | None = None
    """bool [rows]: False for padding rows, which statistics over a micro-batch (MoE routers) leave
    out. None: no row is padding."""
    embeddings: Tensor | None = None
    """Embedding output, for shared blocks; None if the model has none."""
    axes: Axes = field(default_factory=Axes)
    """Tensor-parallel and context-parallel axes."""
    state: State | None = None
    """Per call: the operator's state in generation, read and updated."""
    adapters: Any = None
    """Per call: the weights that a shared block's call adds (LoRA)."""
    stored: Quantized | None = None
    """Per call: x in FP8, if the norm before it stored it so."""
    losses: list[Tensor] = field(default_factory=list)
    """Per call: operators append their auxiliary losses here, [rows]."""
    received: list[int] = field(default_factory=list)
    """Rows that this rank's experts received from all ranks: a number per call to an operator with
    experts, including recomputed calls; 0 without expert parallelism."""
    routed: list[Tensor] | None = None
    """Text tokens by expert, [experts]: operators append them if it is a list."""
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """What layers derive from positions (`derive`)."""

    def derive(self, key: Hashable, compute: Callable[[Tensor], T]) -> T:
        """Return compute(positions), computed once per key for all layers. Where operations are
        traced or compiled, it is computed anew: a graph must not depend on earlier calls."""
        if is_compiling() or is_watched():
            return compute(self.positions)
        if key not in self.derived:
            self.derived[key] = compute(self.positions)
        result: T = self.derived[key]
        return result

    def call_context(self, state: State | None, axes: Axes | None = None) -> BatchContext:
        """Return the context for an operator call, with an empty list of losses."""
        return self._copy(state=state, losses=[], axes=axes or self.axes)

    def layer_context(self, *, counts_routed: bool) -> BatchContext:
        """Return the context for a layer, with empty lists: recomputation appends to them later."""
        return self._copy(received=[], routed=[] if counts_routed else None)

    def _copy(self, **changes: Any) -> BatchContext:
        """Return a copy with changes, like `replace`, which is slow: a step makes hundreds."""
        if is_compiling():
            return replace(self, **changes)
        context = object.__new__(BatchContext)
        context.__dict__.update(self.__dict__, **changes)
        return context

    def whole_row_context(self, length: int) -> BatchContext:
        """Return the context for full rows, which operators gather over the context axis. A rank
        has `length` tokens in each row."""
        axis = self.axes.context
        if axis.size == 1:
            return self
        if self.documents is None:
            documents = None
            positions = torch.arange(length * axis.size, device=self.positions.device).unsqueeze(0)
        else:
            assert self.documents.full_rows is not None, "a part's documents know those of its rows"
            documents, positions = self.documents.full_rows, self.documents.full_rows.positions
        axes = replace(self.axes, context=ALONE)
        return replace(self, positions=positions, documents=documents, axes=axes, derived={})


class Operator(nn.Module, ABC):
    """Maps x [rows, length, width] to the same shape, given a BatchContext.

    Forward passes take sizes from their weights, so that tensor parallelism can replace the
    weights by local shards. The outputs must then be summed over the axis.
    """

    Options: ClassVar[type[OperatorOptions]]
    once: ClassVar[tuple[str, ...]] = ()
    """Child modules that run once for a batch, such as the network that computes a filter."""
    no_decay: ClassVar[tuple[str, ...]] = ()
    """Parameters without weight decay although they have several dimensions: channel rates, gains
    and biases. A pull towards 0 would change the function, not make it smaller."""
    full_precision: ClassVar[tuple[str, ...]] = ()
    """Parameters that are fp32 beside bf16 weights: rates, decays and residues. A scan applies them
    thousands of times, so their rounding would grow."""

    unrounded: ClassVar[tuple[str, ...]] = ()
    """Projections that never run in FP8: ranks may hold parts of their outputs' gradients, and
    rounded parts are not the rounded sum."""
    untrained: ClassVar[tuple[str, ...]] = ()
    """Parameters that no optimizer trains: they have no gradient."""
    experts: ClassVar[tuple[str, ...]] = ()
    """Parameters whose dimension 0 counts experts: expert parallelism shards them."""

    def __init__(self, options: Any, width: int) -> None:
        super().__init__()
        self.options = options
        self.width = width

    def axes(self, axes: Axes) -> Axes:
        """Return the model axes that shard this operator."""
        return axes.share_rows() if self.experts and axes.experts.size > 1 else axes

    @abstractmethod
    def forward(self, x: Tensor, batch: BatchContext) -> Tensor: ...

    @abstractmethod
    def init_weights(self, init: Initializers) -> None: ...

    @abstractmethod
    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Return how parameters are sharded over `ranks` tensor-parallel ranks."""

    def attention_call(self, dtype: torch.dtype) -> AttentionCall | None:
        """Return what the operator asks of attention in this dtype, or None."""
        return None

    def fused(self, device: torch.device) -> bool:
        """Return True if the options request fused kernels on this device."""
        return isinstance(self.options, FusedOptions) and requests_kernel(
            self.options.kernel, device
        )

    def untraced(self, axes: Axes, device: torch.device) -> str | None:
        """Return what torch.compile cannot trace in a call with these axes, or None."""
        return None

    def packing_chunks(self, length: int) -> set[int]:
        """Return the chunk sizes to which plain torch aligns packed rows with this length."""
        return set()

    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Return parameters [stack, rows, columns] that hold projections outside linear layers: by
        name, the row counts of their concatenated projections."""
        return {}

    def unused_parameters(self) -> int:
        """Count the parameters that a token does not use."""
        return 0

    def flops(self, length: int) -> dict[str, float]:
        """Count forward FLOPs per token at this sequence length, by computation.

        Products with weight matrices are left out: they are counted from the module.
        """
        return {}

    def step_flops(self, seen: int) -> dict[str, float]:
        """Return FLOPs for one generated token, after `seen` tokens."""
        return self.flops(seen)


class SharedCall(Recomputable, ABC):
    """A call to a shared operator: `forward(operator, x, batch)`, with the call's own weights.

    Under tensor parallelism, input and output are this rank's slice of each sequence.
    """

    @abstractmethod
    def forward(self, operator: nn.Module, x: Tensor, batch: BatchContext) -> Tensor: ...

    @abstractmethod
    def init_weights(self, init: Initializers) -> None: ...

    @abstractmethod
    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Return how parameters are sharded over `ranks` tensor-parallel ranks."""


class SharedOperator(Operator):
    """Feeds other layers; all calls share its weights. Under tensor parallelism, input and output
    are sequence slices, as in `SharedCall`."""

    @abstractmethod
    def new_call(self) -> SharedCall:
        """Create a call's weights."""
