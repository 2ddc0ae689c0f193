"""Per-layer signals in a step's forward passes: output RMS and expert load.

    model.watch = LayerWatch(config) ─► forward passes ─► sums on this rank ─► sums over all ranks

Every residual stream element lies on one rank, so every layout has the same sums. Tensor parallel
ranks route the same tokens, so all tokens count equally often: expert shares are the same in every
layout too. Padding rows are left out. Without a watch nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..config.config import ModelConfig


class LayerOutput(NamedTuple):
    """A layer's signals over a step's forward passes."""

    activation_rms: float
    """RMS of the residual stream after the layer."""
    expert_max: float | None = None
    """Tokens on the busiest expert, in multiples of the mean; None without experts."""
    expert_entropy: float | None = None
    """Entropy of the experts' token shares: 1 if they are equal, 0 if one expert gets all."""

    def entry(self) -> dict[str, float]:
        """Return the signals that the layer has, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class LayerWatch:
    """Sums over a step's forward passes, on this rank."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.experts = [
            [config.operators[name].expert_count or 0 for name in layer.branches]
            for layer in config.layers
        ]
        """Expert counts by layer and operator, 0 for operators without experts."""
        self.widest = max([0, *(count for layer in self.experts for count in layer)])
        self.sums = torch.zeros(
            len(self.experts), 2 + 2 * self.widest, dtype=torch.float64, device=device
        )
        """Per layer: Σ x², the element count, and its operators' tokens by expert."""

    def add(self, layer: int, u: Tensor, rows: Tensor | None, routed: Sequence[Tensor]) -> None:
        """Add a layer's output u [rows, length, width], and the tokens by expert [experts] for each
        operator with experts."""
        with torch.no_grad():
            squares = torch.linalg.vector_norm(u, dim=(1, 2), dtype=torch.float32).square()
            row_mask = torch.ones_like(squares) if rows is None else rows.to(squares.dtype)
            layer_sums = self.sums[layer]
            layer_sums[0] += (squares * row_mask).sum()
            layer_sums[1] += row_mask.sum() * u[0].numel()
            for operator_index, tokens in enumerate(routed[:2]):
                begin = 2 + operator_index * self.widest
                layer_sums[begin : begin + len(tokens)] += tokens

    def outputs(self, sums: Tensor) -> dict[str, LayerOutput]:
        """Compute the signals by layer from sums over all ranks, in host memory."""
        outputs = {}
        for index, (experts, layer_sums) in enumerate(
            zip(self.experts, sums.view(self.sums.shape), strict=True)
        ):
            rms = math.sqrt(float(layer_sums[0]) / max(float(layer_sums[1]), 1.0))
            tokens = layer_sums[2:].view(2, -1)
            counts = [count for count in experts if count]
            loads = [
                _load(tokens[operator_index, :count]) for operator_index, count in enumerate(counts)
            ]
            # Of two operators with experts, the one with the less even load.
            outputs[f"blocks.{index}"] = LayerOutput(rms, *max(loads, default=(None, None)))
        return outputs


def _load(tokens: Tensor) -> tuple[float, float]:
    """Return the busiest expert's tokens in multiples of the mean, and the entropy."""
    shares = tokens / tokens.sum().clamp(min=1)
    entropy = float(torch.special.entr(shares).sum()) / math.log(max(2, len(shares)))
    return float(shares.max()) * len(shares), entropy
