"""Hyena-LI, modal: a filter as long as the document, with N exponentials.

    h_t = Σ_n R_n · exp(−e^{r_n} · t)                      real poles: StripedHyena 2
    h_t = Re Σ_n R_n · exp((−e^{r_n} + i·φ_n) · t)         complex poles: StripedHyena 1

`hyena_modal` computes it. `rates: product` learns r as p + γ with two parameters, as Savanna does:
the function is the same, and it moves twice as far in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..config.options.hyena_li import HyenaLIOptions
from ..config.precision import widen
from ..layers.initializers import Initializers
from ..parallel.local_shard import ShardingSpec, shard_filters
from .hyena_modal import ModalHyena


class HyenaLI(ModalHyena):
    Options = HyenaLIOptions
    no_decay = full_precision = ("rates", "angles", "residues", "residues_i")

    def __init__(self, options: HyenaLIOptions, width: int) -> None:
        super().__init__(options, width)
        shape = (self.groups, options.state_size)
        self.oscillates = options.poles == "complex"
        factors = (2,) if options.rates == "product" else ()
        self.rates = nn.Parameter(torch.empty(*factors, *shape))
        self.residues = nn.Parameter(torch.empty(shape))
        self.angles = nn.Parameter(torch.empty(shape)) if self.oscillates else None
        self.residues_i = nn.Parameter(torch.empty(shape)) if self.oscillates else None

    def modes(self) -> tuple[Tensor, Tensor]:
        rates = plain_rates(widen(self.rates), self.options)
        residues = widen(self.residues)
        if self.angles is None or self.residues_i is None:
            return rates, residues
        rates = torch.complex(rates, -widen(self.angles))
        return rates, torch.complex(residues, widen(self.residues_i))

    def init_weights(self, init: Initializers) -> None:
        super().init_weights(init)
        # γ = log u for uniform u, p = −1: the rate is e^{p+γ}.
        initial_rates: dict[str, Callable[[Tensor], Tensor]] = {
            "log": lambda u: (u / math.e).log(),
            "plain": lambda u: u / math.e,
            "product": lambda u: torch.stack([-torch.ones_like(u[0]), u[1].log()]),
        }
        options = self.options
        init.uniform(self.rates, options.gamma_min, options.gamma_max, initial_rates[options.rates])
        init.normal(self.residues, 0.1 / math.sqrt(options.state_size))
        if self.angles is not None and self.residues_i is not None:
            init.uniform(self.angles, 0, math.pi)
            init.normal(self.residues_i, 0.1 / math.sqrt(options.state_size))

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        return {
            **super().sharding_spec(ranks),
            **shard_filters(["angles", "residues", "residues_i"], self.groups, ranks),
            **shard_filters(["rates"], self.groups, ranks, dim=self.rates.dim() - 2),
        }


def plain_rates(rates: Tensor, options: HyenaLIOptions) -> Tensor:
    """Map the parameter [filters, N], or [2, filters, N] for "product", to λ [filters, N]."""
    if options.rates == "product":
        rates = rates.sum(0)
    return rates if options.rates == "plain" else torch.exp(rates)
