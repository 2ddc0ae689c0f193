"""Exact parameters and floating-point operations, counted from the built module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from ..config.config import ModelConfig
from ..config.options.recompute import Results, Rule, Selective
from ..layers.linear import SplitLinear
from ..model.model import Model
from ..operators import Operator

TRAINING = 3.0
"""Cost of a forward and a backward pass, in forward passes: backward has two products for each."""


def build_meta(config: ModelConfig) -> Model:
    """Build the model on the meta device, without storage."""
    with torch.device("meta"):
        return Model(config)


def parameters(model: nn.Module) -> int:
    """Count parameters; tied and shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def active_parameters(model: Model) -> int:
    """Count the parameters that a token uses: of experts, those that it is sent to."""
    operators = [branch.operator for block in model.typed_blocks() for branch in block.branches()]
    return parameters(model) - sum(operator.unused_parameters() for operator in operators)


def parameters_by_part(model: Model) -> dict[str, int]:
    """Count parameters by part: embedding, each operator by its YAML name, norms, head."""
    parts: Counter[str] = Counter()
    parts["embedding"] = model.embedding.weight.numel()
    if model.positions is not None:
        parts["positions"] = model.positions.weight.numel()
    norms = parameters(model.norm)
    for name, shared in model.shared.items():
        parts[name] = parameters(shared)
    for layer, block in zip(model.config.layers, model.typed_blocks(), strict=True):
        if block.call is not None:
            parts[f"{layer.shared} (calls)"] += parameters(block.call)
        for name, branch in zip(layer.branches, block.branches(), strict=True):
            parts[name] += parameters(branch.operator)
            norms += parameters(branch.norm)
    parts["norms"] = norms
    if model.head is not None:
        parts["head"] = model.head.weight.numel()
    assert sum(parts.values()) == parameters(model), "every parameter is in one part"
    return dict(parts)


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> dict[str, float]:
    """Count FLOPs by part: two for each weight of a matrix product, and each operator's own.

    Attention is counted as the plain kernels compute it: every pair of the row, including the
    masked half.
    """
    return forward_flops(build_meta(config), seq_len)


def step_flops_per_token(config: ModelConfig, seen: int) -> dict[str, float]:
    """Count FLOPs by part for one generated token after `seen` others."""
    return step_flops(build_meta(config), seen)


def training_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Count FLOPs of forward and backward pass; recomputation is not counted."""
    return TRAINING * sum(forward_flops_per_token(config, seq_len).values())


def forward_flops(model: Model, seq_len: int) -> dict[str, float]:
    return flops_by_part(model, lambda operator: operator.flops(seq_len))


def step_flops(model: Model, seen: int) -> dict[str, float]:
    return flops_by_part(model, lambda operator: operator.step_flops(seen))


def flops_by_part(model: Model, own: Callable[[Operator], dict[str, float]]) -> dict[str, float]:
    """Add matrix products and `own`, the other FLOPs of an operator, by part."""
    parts: defaultdict[str, float] = defaultdict(float)
    for layer in layer_flops(model, own):
        for name, flops in layer.items():
            parts[name] += flops
    parts["head"] = head_flops(model)
    return dict(parts)


def flops_by_layer(model: Model, seq_len: int) -> list[float]:
    """Count forward FLOPs for each token of each layer; the last entry is the head."""
    layers = layer_flops(model, lambda operator: operator.flops(seq_len))
    return [*(sum(parts.values()) for parts in layers), head_flops(model)]


def layer_flops(
    model: Model, own: Callable[[Operator], dict[str, float]]
) -> Iterator[dict[str, float]]:
    """Yield the FLOPs of each layer by part."""
    for layer, block in zip(model.config.layers, model.typed_blocks(), strict=True):
        parts: defaultdict[str, float] = defaultdict(float)
        shared = model.shared_block(layer)
        if layer.shared and shared is not None and block.call is not None:
            parts[layer.shared] += matrix_flops(shared) + sum(own(shared).values())
            parts[f"{layer.shared} (calls)"] += matrix_flops(block.call)
        for name, branch in zip(layer.branches, block.branches(), strict=True):
            operator = branch.operator
            parts[name] += matrix_flops(operator) + sum(own(operator).values())
        yield parts


KINDS: dict[str, Results] = {"experts": "matmul", "projections": "matmul", "fft": "convolution"}
"""Kind of operation of an operator's part, where it has another name."""


def recomputed_flops(model: Model, seq_len: int, rules: Sequence[Rule]) -> float:
    """Count the FLOPs for each token that the backward pass computes again."""
    total = 0.0
    for rule, layer, block in zip(rules, model.config.layers, model.typed_blocks(), strict=True):
        if rule == "none":
            continue
        kept = rule.save if isinstance(rule, Selective) else ()
        shared, calls = model.shared_block(layer), block.call
        operators = [shared, *(branch.operator for branch in block.branches())]
        again = defaultdict(float, {"matmul": matrix_flops(calls) if calls else 0.0})
        for operator in filter(None, operators):
            again["matmul"] += matrix_flops(operator)
            for part, flops in operator.flops(seq_len).items():
                again[KINDS.get(part, part)] += flops
        total += sum(flops for kind, flops in again.items() if kind not in kept)
    return total


def head_flops(model: Model) -> float:
    return 2.0 * (model.head or model.embedding).weight.numel()


def matrix_flops(module: nn.Module) -> float:
    """Count two for each weight of the matrices that every token is multiplied by."""
    once = module.once if isinstance(module, Operator) else ()
    matrices = [
        part.weight
        for name, part in module.named_modules()
        if isinstance(part, (nn.Linear, SplitLinear)) and name.partition(".")[0] not in once
    ]
    return 2.0 * sum(weight.numel() for weight in matrices)
