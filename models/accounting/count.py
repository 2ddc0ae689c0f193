"""Exact parameters and FLOPs, counted from the built model."""

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
"""Training FLOPs over forward FLOPs: the backward pass runs two products per forward product."""


def build_meta(config: ModelConfig) -> Model:
    """Build the model on the meta device, without storage."""
    with torch.device("meta"):
        return Model(config)


def count_parameters(model: nn.Module) -> int:
    """Count parameters; tied and shared parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_active_parameters(model: Model) -> int:
    """Count the parameters that a token uses: only the experts it is routed to."""
    operators = [operator for block in model.typed_blocks() for operator in block.operators()]
    return count_parameters(model) - sum(operator.unused_parameters() for operator in operators)


def count_parameters_by_part(model: Model) -> dict[str, int]:
    """Count parameters by part: embedding, operators by YAML name, norms, head."""
    counts: Counter[str] = Counter()
    counts["embedding"] = model.embedding.weight.numel()
    if model.positions is not None:
        counts["positions"] = model.positions.weight.numel()
    norms = count_parameters(model.norm)
    for name, shared in model.shared.items():
        counts[name] = count_parameters(shared)
    for layer, block in zip(model.config.layers, model.typed_blocks(), strict=True):
        if block.call is not None:
            counts[f"{layer.shared} (calls)"] += count_parameters(block.call)
        for name, operator in zip(layer.branches, block.operators(), strict=True):
            counts[name] += count_parameters(operator)
        norms += sum(count_parameters(norm) for branch in block.branches() for norm in branch.norms)
    counts["norms"] = norms
    if model.head is not None:
        counts["head"] = model.head.weight.numel()
    assert sum(counts.values()) == count_parameters(model), "every parameter is in one part"
    return dict(counts)


def forward_flops(model: Model, seq_len: int) -> dict[str, float]:
    """Count forward FLOPs per token by part: two per matrix weight, and the operators' other FLOPs.

    Attention counts all token pairs in a row, including the masked half, as the plain kernels
    compute it.
    """
    return flops_by_part(model, lambda operator: operator.flops(seq_len))


def step_flops(model: Model, num_tokens: int) -> dict[str, float]:
    """Count FLOPs by part for a token generated after `num_tokens` tokens."""
    return flops_by_part(model, lambda operator: operator.step_flops(num_tokens))


def flops_by_part(
    model: Model, operator_flops: Callable[[Operator], dict[str, float]]
) -> dict[str, float]:
    """Sum FLOPs by part: matrix products, and `operator_flops(operator)`."""
    totals: defaultdict[str, float] = defaultdict(float)
    for layer in layer_flops(model, operator_flops):
        for name, flops in layer.items():
            totals[name] += flops
    totals["head"] = head_flops(model)
    return dict(totals)


def flops_by_layer(model: Model, seq_len: int) -> list[float]:
    """Count forward FLOPs per token and layer; the last entry is the head."""
    layers = layer_flops(model, lambda operator: operator.flops(seq_len))
    return [*(sum(flops.values()) for flops in layers), head_flops(model)]


def layer_flops(
    model: Model, operator_flops: Callable[[Operator], dict[str, float]]
) -> Iterator[dict[str, float]]:
    """Yield FLOPs by part, layer by layer."""
    for layer, block in zip(model.config.layers, model.typed_blocks(), strict=True):
        totals: defaultdict[str, float] = defaultdict(float)
        shared = model.shared_block(layer)
        if layer.shared and shared is not None and block.call is not None:
            totals[layer.shared] += matrix_flops(shared) + sum(operator_flops(shared).values())
            totals[f"{layer.shared} (calls)"] += matrix_flops(block.call)
        for name, operator in zip(layer.branches, block.operators(), strict=True):
            totals[name] += matrix_flops(operator) + sum(operator_flops(operator).values())
        yield totals


KINDS: dict[str, Results] = {"experts": "matmul", "projections": "matmul", "fft": "convolution"}
"""Result kind by computation, where the names differ."""


def recomputed_flops(model: Model, seq_len: int, rules: Sequence[Rule]) -> float:
    """Count the FLOPs per token that the backward pass recomputes."""
    total = 0.0
    for rule, layer, block in zip(rules, model.config.layers, model.typed_blocks(), strict=True):
        if rule == "none":
            continue
        saved = rule.save if isinstance(rule, Selective) else ()
        shared, calls = model.shared_block(layer), block.call
        operators = [shared, *block.operators()]
        flops_by_kind = defaultdict(float, {"matmul": matrix_flops(calls) if calls else 0.0})
        for operator in filter(None, operators):
            flops_by_kind["matmul"] += matrix_flops(operator)
            for computation, flops in operator.flops(seq_len).items():
                flops_by_kind[KINDS.get(computation, computation)] += flops
        total += sum(flops for kind, flops in flops_by_kind.items() if kind not in saved)
    return total


def head_flops(model: Model) -> float:
    return 2.0 * (model.head or model.embedding).weight.numel()


def matrix_flops(module: nn.Module) -> float:
    """Count two FLOPs per weight in matrices that multiply every token."""
    once = module.once if isinstance(module, Operator) else ()
    matrices = [
        layer.weight
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, SplitLinear)) and name.partition(".")[0] not in once
    ]
    return 2.0 * sum(weight.numel() for weight in matrices)
