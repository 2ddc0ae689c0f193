"""Recompute: the backward pass runs a part of the forward pass again instead of keeping it.

A run chooses one rule for each layer: keep everything (`none`), keep the inputs of the layer
(`block`) or of its operator calls (`operator`), or keep the inputs of the layer and the results of
some operations (`save`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from ...console.errors import ConfigError, Problem

Unit = Literal["none", "operator", "block"]
"""Part that is computed again: nothing, each operator call, or whole blocks."""
Results = Literal["matmul", "attention", "scan", "convolution"]

OPERATIONS: dict[Results, frozenset[str]] = {
    "matmul": frozenset(
        {"aten::mm", "aten::addmm", "headrace::fp8_linear", "headrace::grouped_product"}
    ),
    "attention": frozenset(
        {
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
            "aten::_flash_attention_forward",
            "torch_attn::_varlen_attn",
        }
    ),
    "scan": frozenset({"headrace::selective_scan", "headrace::ssd", "headrace::modal"}),
    "convolution": frozenset(
        {
            "aten::convolution",
            "headrace::short_convolution",
            "headrace::toeplitz",
            "headrace::fft_convolution",
        }
    ),
}
"""Operations of torch whose results can be kept. A plain scan or attention is many small ones."""


@dataclass(frozen=True, kw_only=True)
class Selective:
    """Recompute each n-th block, except for the results of some operations."""

    every: int = 1
    """1: all blocks."""
    save: tuple[Results, ...] = ()
    """Operations whose results are kept."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, not {self.every}")
        if len(set(self.save)) < len(self.save):
            raise ValueError("save must name each kind of result once")
        if self.every == 1 and not self.save:
            raise ValueError("give `every` or `save`; `block` recomputes all of each block")

    def keeps(self, operation: Any) -> bool:
        """True for an operation (torch.ops.….default) whose result is kept."""
        return any(operation.name().partition(".")[0] in OPERATIONS[kind] for kind in self.save)


Rule = Unit | Selective
"""Rule of one layer."""
Recompute = Rule | float | tuple[Rule, ...]
"""A rule for all layers, a fraction of the blocks, or a rule for each layer."""


def rules_of(recompute: Recompute, layers: int) -> tuple[Rule, ...]:
    """Return the rule of each layer: `none`, `operator`, `block`, or the results to save."""
    if isinstance(recompute, tuple):
        if len(recompute) != layers:
            _refuse(f"has {len(recompute)} rules, and the model {layers} layers")
        if any(isinstance(rule, Selective) and rule.every > 1 for rule in recompute):
            _refuse("a rule of one layer has no `every`")
        return recompute
    if isinstance(recompute, float):
        # The blocks are spread evenly: up to each layer, their number is the rounded fraction.
        rounded = [int(recompute * number + 0.5) for number in range(layers + 1)]
        return tuple("block" if more > less else "none" for less, more in pairwise(rounded))
    if isinstance(recompute, Selective):
        rule: Rule = replace(recompute, every=1) if recompute.save else "block"
        return tuple(
            "none" if number % recompute.every else rule for number in range(1, layers + 1)
        )
    return (recompute,) * layers


def _refuse(what: str) -> NoReturn:
    raise ConfigError("the run", [Problem("recompute", what)])


class Recomputable(nn.Module):
    """A module whose call may be recomputed, with no change to its `forward`.

    The whole call is recomputed, hooks included: engines that shard weights gather them again.
    """

    recompute: bool = False
    saved: Selective | None = None
    """Results that the call keeps."""

    def __call__(self, *inputs: Any) -> Any:
        if not (self.recompute and torch.is_grad_enabled()):
            return super().__call__(*inputs)
        if self.saved is None:
            return checkpoint(super().__call__, *inputs, use_reentrant=False)
        contexts = partial(_contexts, self.saved)
        return checkpoint(super().__call__, *inputs, use_reentrant=False, context_fn=contexts)


def _contexts(saved: Selective) -> tuple[Any, Any]:
    """Return the contexts of a forward pass and of its recomputation.

    torch's own (create_selective_checkpoint_contexts) need the same operations in both; engines
    that gather weights ahead have others.
    """
    results: deque[_Result] = deque()
    return _Keep(saved, results), _TakeBack(saved, results)


@dataclass
class _Result:
    operation: Any
    value: Any
    """None after a write to it."""


class _Saved(TorchDispatchMode):
    """Base of the two contexts, which share the results."""

    def __init__(self, saved: Selective, results: deque[_Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved, self.results = saved, results


class _Keep(_Saved):
    """Keep the results of operations."""

    def __init__(self, saved: Selective, results: deque[_Result]) -> None:
        super().__init__(saved, results)
        self.by_storage: dict[int, _Result] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        made = operation(*inputs, **options)
        for tensor in _written(operation, inputs, options):
            if changed := self.by_storage.pop(_storage(tensor), None):
                changed.value = None
        if self.saved.keeps(operation):
            kept = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, made)
            self.results.append(_Result(operation, kept))
            self.by_storage |= {_storage(x): self.results[-1] for x in _tensors(kept)}
        return made


class _TakeBack(_Saved):
    """Return the kept results of operations in the order of the forward pass."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        if self.saved.keeps(operation):
            result = self.results.popleft()
            assert result.operation is operation, f"{operation}, not {result.operation}"
            if result.value is not None:
                return result.value
        return operation(*inputs, **(options or {}))


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
