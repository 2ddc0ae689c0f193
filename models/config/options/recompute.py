"""Recompute rules: activations that a layer's backward pass computes again.

A run chooses a rule per layer: save all activations (`none`), save the layer's inputs (`block`),
save the inputs of its operator calls (`operator`), or save the layer's inputs and the results of
selected operations (`save`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NoReturn

from ....console.errors import ConfigError, ConfigProblem

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
"""Torch operations whose results can be saved. A plain scan or attention is many small ones."""


@dataclass(frozen=True, kw_only=True)
class Selective:
    """Recompute every n-th block, except for the results of selected operations."""

    every: int = 1
    """1: all blocks."""
    save: tuple[Results, ...] = ()
    """Operations whose results are kept. Scans and convolutions are kept where they are fused
    kernels, plain ones are computed again; ring attention keeps its merged output. Not with
    engine.compile: a compiled block is one operation."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, not {self.every}")
        if len(set(self.save)) < len(self.save):
            raise ValueError("save must name each kind of result once")
        if self.every == 1 and not self.save:
            raise ValueError("give `every` or `save`; `block` recomputes all of each block")

    def keeps(self, operation: Any) -> bool:
        """True for an operation (torch.ops.….default) whose result is saved."""
        return any(operation.name().partition(".")[0] in OPERATIONS[kind] for kind in self.save)


Rule = Unit | Selective
"""Rule for a layer."""


Recompute = Rule | float | tuple[Rule, ...]
"""One rule for all layers, a fraction of blocks to recompute, or a rule per layer."""


def expand_rules(recompute: Recompute, num_layers: int) -> tuple[Rule, ...]:
    """Return a rule per layer: `none`, `operator`, `block`, or the results to save."""
    if isinstance(recompute, tuple):
        if len(recompute) != num_layers:
            _refuse(f"has {len(recompute)} rules, and the model {num_layers} layers")
        if any(isinstance(rule, Selective) and rule.every > 1 for rule in recompute):
            _refuse("a rule of one layer has no `every`")
        return recompute
    if isinstance(recompute, float):
        # Spread blocks evenly: up to any layer, their number is the rounded fraction.
        rounded = [int(recompute * number + 0.5) for number in range(num_layers + 1)]
        return tuple("block" if after > before else "none" for before, after in pairwise(rounded))
    if isinstance(recompute, Selective):
        rule: Rule = replace(recompute, every=1) if recompute.save else "block"
        return tuple(
            "none" if number % recompute.every else rule for number in range(1, num_layers + 1)
        )
    return (recompute,) * num_layers


def _refuse(reason: str) -> NoReturn:
    raise ConfigError("the run", [ConfigProblem("recompute", reason)])
