"""Recompute: the backward pass runs parts of the forward pass again instead of keeping activations.

`config/options/recompute.py` has the rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from ..config.options.recompute import Results, Selective
from ..parallel.whole_results import CompositeResultMode, Compute


class Recomputable(nn.Module):
    """A module whose call may be recomputed, with no change to its `forward`.

    The whole call is recomputed, hooks included: engines that shard weights gather them again.
    """

    recompute: bool = False
    saved: Selective | None = None
    """Results that the call stores."""

    def __call__(self, *inputs: Any) -> Any:
        if not self.recompute:
            return super().__call__(*inputs)
        if self.saved is None:
            return recomputed(super().__call__, *inputs)
        return recomputed(super().__call__, *inputs, context_fn=partial(_contexts, self.saved))


def recomputed(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Call a function, and again in the backward pass: only its inputs are stored. Random generator
    states are not: no operator draws numbers, a state is a 5 KB copy, and on a GPU the host waits
    for it."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


def _contexts(saved: Selective) -> tuple[Any, Any]:
    """Return the contexts for a forward pass and its recomputation.

    torch's own (create_selective_checkpoint_contexts) need the same operations in both; engines
    that gather weights ahead have others.
    """
    results: deque[_Result] = deque()
    return _StoreResults(saved, results), _ReplayResults(saved, results)


@dataclass
class _Result:
    operation: Any
    """A torch operation, or a composite result's kind."""
    value: Any
    """None after a write to it."""


class _ResultsContext(CompositeResultMode):
    """Base class for both contexts, which share the results."""

    def __init__(self, saved: Selective, results: deque[_Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved, self.results = saved, results
        self.within = False
        """True in operations within a composite result."""

    def keeps(self, operation: Any) -> bool:
        return not self.within and self.saved.keeps(operation)

    def computed(self, compute: Compute) -> tuple[Tensor, ...]:
        """Compute a composite result, without storing its operations' results."""
        self.within = True
        try:
            return compute()
        finally:
            self.within = False


class _StoreResults(_ResultsContext):
    """Store the results of operations."""

    def __init__(self, saved: Selective, results: deque[_Result]) -> None:
        super().__init__(saved, results)
        self.by_storage: dict[int, _Result] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        result = operation(*inputs, **options)
        for tensor in _written(operation, inputs, options):
            if changed := self.by_storage.pop(_storage(tensor), None):
                changed.value = None
        if self.keeps(operation):
            self._keep(operation, result)
        return result

    def _keep(self, operation: Any, result: Any) -> None:
        detached = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result)
        self.results.append(_Result(operation, detached))
        self.by_storage |= {_storage(x): self.results[-1] for x in _tensors(detached)}

    def run_composite(self, kind: Results, compute: Compute) -> tuple[Tensor, ...]:
        if kind not in self.saved.save:
            return compute()
        result = self.computed(compute)
        self._keep(kind, result)
        return result


class _ReplayResults(_ResultsContext):
    """Return stored results, in the order of the forward pass."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        stored = self._take(operation) if self.keeps(operation) else None
        return operation(*inputs, **(options or {})) if stored is None else stored

    def _take(self, operation: Any) -> Any:
        """Return the operation's stored result, None if it was written to."""
        result = self.results.popleft()
        assert result.operation == operation, f"{operation}, not {result.operation}"
        return result.value

    def run_composite(self, kind: Results, compute: Compute) -> tuple[Tensor, ...]:
        if kind not in self.saved.save:
            return compute()
        stored: tuple[Tensor, ...] | None = self._take(kind)
        return self.computed(compute) if stored is None else stored


def _written(operation: Any, inputs: Any, options: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to (ZeRO-3 adds biases in place)."""
    arguments = enumerate(operation._schema.arguments if operation._schema.is_mutable else ())
    return _tensors(
        [
            inputs[number] if number < len(inputs) else options.get(argument.name)
            for number, argument in arguments
            if argument.is_write
        ]
    )


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
