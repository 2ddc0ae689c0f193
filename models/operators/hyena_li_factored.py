"""Hyena-LI with real poles, poles and residues as products: Savanna's `implicit_real_modal`.

    λ_n = clamp(δ_n, 0.001, 0.1) · exp(Π_j p_nj)
    h_t = Σ_n (Π_j R_nj) · exp(−λ_n · t · S/(S−1))         for each group of channels

`hyena_modal` computes it. S, the horizon, is a model constant: Savanna spreads L time points over
[0, L], where L is its row length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..config.options.hyena_li_factored import HyenaLIFactoredOptions
from ..config.precision import widen
from ..layers.initializers import Initializers
from ..parallel.local_shard import ShardingSpec, shard_filters
from .hyena_modal import ModalHyena

SHORTEST, LONGEST = 0.001, 0.1
"""Bounds on δ. Beyond them it has no gradient."""


class HyenaLIFactored(ModalHyena):
    Options = HyenaLIFactoredOptions
    no_decay = full_precision = ("steps", "poles", "residues")
    oscillates = False

    def __init__(self, options: HyenaLIFactoredOptions, width: int) -> None:
        super().__init__(options, width)
        shape = (self.groups, options.state_size)
        self.steps = nn.Parameter(torch.empty(shape))
        self.poles = nn.Parameter(torch.empty(*shape, options.pole_factors))
        self.residues = nn.Parameter(torch.empty(*shape, options.residue_factors))

    def modes(self) -> tuple[Tensor, Tensor]:
        horizon = self.options.filter_horizon
        steps = widen(self.steps).clamp(SHORTEST, LONGEST)
        rates = steps * torch.exp(widen(self.poles).prod(-1))
        return rates * (horizon / (horizon - 1)), widen(self.residues).prod(-1)

    def init_weights(self, init: Initializers) -> None:
        super().init_weights(init)
        init.uniform(self.steps, SHORTEST, LONGEST)
        shape = self.poles.shape  # every filter starts with the same poles
        init.set(self.poles, lambda g: torch.randn(shape[1:], generator=g).expand(shape))
        init.normal(self.residues, 1 / math.sqrt(self.options.state_size))

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        return {**super().sharding_spec(ranks), **shard_filters(self.no_decay, self.groups, ranks)}
