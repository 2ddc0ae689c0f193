"""Exact parameters and floating-point operations, from the module itself."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
from torch import nn

from .config import ModelConfig
from .linear import SplitLinear
from .model import Embedding, Model
from .operators import Operator


def build_meta(config: ModelConfig) -> Model:
    """The model without storage: any size is built in a moment."""
    with torch.device("meta"):
        return Model(config)


def parameters(model: nn.Module) -> int:
    """Every parameter once, whether or not it is tied or shared."""
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_by_part(model: Model) -> dict[str, int]:
    """By part: the embedding, each operator by its name in the YAML, the norms."""
    parts: Counter[str] = Counter()
    parts["embedding"] = model.embedding.weight.numel()
    for name, table in (("positions", model.positions), ("head", model.head)):
        if table is not None:
            parts[name] = table.weight.numel()
    for name, shared in model.shared.items():
        parts[name] = parameters(shared)
    for layer, block in zip(model.config.layers, model.typed_blocks(), strict=True):
        if block.call is not None:
            parts[f"{layer.shared} (calls)"] += parameters(block.call)
        for name, branch in zip(layer.branches, block.branches(), strict=True):
            parts[name] += parameters(branch.operator)
            parts["norms"] += parameters(branch.norm)
    parts["norms"] += parameters(model.norm)
    assert sum(parts.values()) == parameters(model), "every parameter is in one part"
    return dict(parts)


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> dict[str, float]:
    """By part: two for each weight of a matrix product, and each operator's own, as it says.

    Attention is counted as the plain kernels compute it: every pair of the row.
    """
    model = build_meta(config)
    parts: defaultdict[str, float] = defaultdict(float)
    for layer, block in zip(config.layers, model.typed_blocks(), strict=True):
        shared = model.shared_block(layer)
        if layer.shared and shared is not None and block.call is not None:
            parts[layer.shared] += operator_flops(shared, seq_len)
            parts[f"{layer.shared} (calls)"] += matrix_flops(block.call)
        for name, branch in zip(layer.branches, block.branches(), strict=True):
            parts[name] += operator_flops(branch.operator, seq_len)
    parts["head"] = matrix_flops(model.head or model.embedding)
    return dict(parts)


def operator_flops(operator: Operator, seq_len: int) -> float:
    return matrix_flops(operator) + sum(operator.flops(seq_len).values())


def matrix_flops(module: nn.Module) -> float:
    matrices = [
        m.weight for m in module.modules() if isinstance(m, (nn.Linear, SplitLinear, Embedding))
    ]
    return 2.0 * sum(weight.numel() for weight in matrices)


def training_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Forward and backward: three times the forward pass; recomputation is not counted."""
    return 3.0 * sum(forward_flops_per_token(config, seq_len).values())
