"""Hyena-LI with complex poles in S4D form: Savanna's `implicit_complex_modal`.

    a_n = −e^{r_n} + i·φ_n,  δ = e^{s}                     one step δ for each filter
    h_t = 2·Re Σ_n δ·B_n·C_n / (1 − δ·a_n/2) · exp(δ·a_n·t)

`hyena_modal` computes it. It starts as S4D-Lin: r = log ½, φ_n = π·n, δ from 0.001 to 0.1, B = 1,
C complex and normal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..config.options.hyena_li_s4d import HyenaLIS4DOptions
from ..config.precision import widen
from ..layers.initializers import Initializers
from ..parallel.local_shard import ShardingSpec, shard_filters
from .hyena_modal import ModalHyena

SHORTEST, LONGEST = 0.001, 0.1
"""Initial range of δ."""


class HyenaLIS4D(ModalHyena):
    Options = HyenaLIS4DOptions
    no_decay = ("rates", "angles", "inputs", "inputs_i", "residues", "residues_i")
    full_precision = ("steps", *no_decay)
    oscillates = True

    def __init__(self, options: HyenaLIS4DOptions, width: int) -> None:
        super().__init__(options, width)
        shape = (self.groups, options.state_size)
        self.steps = nn.Parameter(torch.empty(self.groups))
        self.rates = nn.Parameter(torch.empty(shape))
        self.angles = nn.Parameter(torch.empty(shape))
        self.inputs = nn.Parameter(torch.empty(shape))
        self.inputs_i = nn.Parameter(torch.empty(shape))
        self.residues = nn.Parameter(torch.empty(shape))
        self.residues_i = nn.Parameter(torch.empty(shape))

    def modes(self) -> tuple[Tensor, Tensor]:
        step = torch.exp(widen(self.steps)).unsqueeze(-1)
        rates = step * torch.complex(torch.exp(widen(self.rates)), -widen(self.angles))
        inputs = torch.complex(widen(self.inputs), widen(self.inputs_i))
        outputs = torch.complex(widen(self.residues), widen(self.residues_i))
        return rates, 2 * step * inputs * outputs / (1 + rates / 2)

    def init_weights(self, init: Initializers) -> None:
        super().init_weights(init)
        init.uniform(self.steps, math.log(SHORTEST), math.log(LONGEST))
        init.constant(self.rates, math.log(0.5))
        init.constant(self.angles, math.pi * torch.arange(self.options.state_size))
        init.constant(self.inputs, 1.0)
        init.constant(self.inputs_i, 0.0)
        init.normal(self.residues, math.sqrt(0.5))
        init.normal(self.residues_i, math.sqrt(0.5))

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        modes = shard_filters(self.full_precision, self.groups, ranks)
        return {**super().sharding_spec(ranks), **modes}
