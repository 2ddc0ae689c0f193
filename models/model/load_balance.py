"""Balance of experts without a loss: each step moves the routers' correction biases (DeepSeek V3).

    forward passes of a step ─► tokens by expert on this rank ─► sums over all ranks
    c_e ← c_e + rate · sign(mean tokens − tokens of e)

Counts are integers: all ranks have the same sums, and so the same biases to the bit. Where several
ranks route the same tokens, each counts them equally often, which leaves the signs. A pass that the
backward pass repeats counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..config.config import ModelConfig
from ..operators.moe import MoE


class RouterPlace(NamedTuple):
    """A router, and the range of its experts in the counts of all routers."""

    layer: int
    number: int
    """Position among the layer's routers, in the order of their calls."""
    begin: int
    end: int


class LoadBalance:
    """Tokens by expert in a step's forward passes, for the routers of all stages."""

    def __init__(self, config: ModelConfig) -> None:
        self.places: list[RouterPlace] = []
        self.size = 0
        for layer, operators in enumerate(config.layers):
            options = [config.operators[name] for name in operators.branches]
            counts = [option.expert_count for option in options if option.expert_count is not None]
            for number, count in enumerate(counts):
                self.places.append(RouterPlace(layer, number, self.size, self.size + count))
                self.size += count
        self.counts: Tensor | None = None
        """int64 [experts of all routers]; None before a step's first pass."""

    def add(self, layer: int, routed: Sequence[Tensor]) -> None:
        """Add the tokens by expert [experts] of each router in a layer."""
        for place in self.places:
            if place.layer == layer:
                tokens = routed[place.number].detach()
                if self.counts is None:
                    self.counts = tokens.new_zeros(self.size)
                self.counts[place.begin : place.end] += tokens

    def take(self, device: torch.device) -> Tensor:
        """Return this rank's counts since the last call."""
        counts, self.counts = self.counts, None
        if counts is None:
            return torch.zeros(self.size, dtype=torch.int64, device=device)
        return counts

    @torch.no_grad()
    def move(self, blocks: nn.ModuleDict, counts: Tensor, finite: Tensor) -> None:
        """Move the biases in `blocks`, by layer, by the counts of all ranks; nothing moves unless
        `finite`."""
        for place in self.places:
            if str(place.layer) not in blocks:
                continue
            modules = blocks[str(place.layer)].modules()
            router = [module for module in modules if isinstance(module, MoE)][place.number]
            rate, tokens = router.options.bias_update_rate, counts[place.begin : place.end]
            if rate:
                signs = torch.sign(tokens.sum() - tokens * len(tokens)) * finite
                assert router.correction_bias is not None
                router.correction_bias += rate * signs


def build_load_balance(config: ModelConfig) -> LoadBalance | None:
    """Return the balance of a model's experts, or None if no router has a bias that moves."""
    rates = (getattr(options, "bias_update_rate", None) for options in config.operators.values())
    return LoadBalance(config) if any(rates) else None
