"""Mixture of experts: a router sends each token to a few of many MLPs.

softmax     p = softmax(x·W); the k largest, scaled to sum to one (Mixtral, Switch)
sigmoid     p = sigmoid(x·W + b); the largest (BlackMamba). In training, Sinkhorn's iteration
            on exp(2·logits) makes the choice, so that experts get equal numbers of tokens

y = Σ_chosen p_e · (act(x·W_gate,e) ⊙ x·W_up,e)·W_down,e
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..initializers import Initializers
from ..layers.grouped import grouped_product
from ..parallel.axes import ALONE, Axis
from ..parallel.experts import Trip
from ..parallel.sharding import Sharded, ShardingSpec
from ..parallel.tensor import highest, reduce
from ..precision import widen
from .base import BatchContext, Operator, OperatorOptions
from .mlp import ACTIVATIONS, Activation

SINKHORN_ROUNDS = 32


@dataclass(frozen=True, kw_only=True)
class MoEOptions(OperatorOptions):
    """Mixture of gated MLPs."""

    kind: Literal["moe"] = "moe"
    experts: int
    """Number of experts."""
    top_k: int = 2
    """Number of experts for each token."""
    hidden: int
    """Hidden width of an expert."""
    activation: Activation = "silu"
    """Activation of each expert's gate."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Function from an expert's score to its weight."""
    sinkhorn: bool = False
    """Balance the choice in training by Sinkhorn's iteration; evaluation takes the largest."""
    balance_loss: float = 0.0
    """Coefficient of experts · Σ (fraction of tokens) · (mean probability)."""
    z_loss: float = 0.0
    """Coefficient of the mean of log²Σexp(logits)."""

    @property
    def expert_count(self) -> int:
        return self.experts

    def problems(self, width: int) -> Iterator[str]:
        if self.hidden < 1:
            yield f"hidden must be at least 1, not {self.hidden}"
        if not 1 <= self.top_k <= self.experts:
            yield f"top_k ({self.top_k}) must lie between 1 and experts ({self.experts})"
        for name in ("balance_loss", "z_loss"):
            if getattr(self, name) < 0:
                yield f"{name} must not be below 0: {getattr(self, name)}"
        if self.router == "sigmoid" and self.balance_loss:
            yield "balance_loss belongs to the softmax router; `sinkhorn: true` balances sigmoid"


class MoE(Operator):
    Options = MoEOptions
    tokenwise = True
    experts = ("gate_up", "down")

    def __init__(self, options: MoEOptions, width: int) -> None:
        super().__init__(options, width)
        self.router = nn.Linear(width, options.experts, bias=options.router == "sigmoid")
        self.gate_up = nn.Parameter(torch.empty(options.experts, 2 * options.hidden, width))
        self.down = nn.Parameter(torch.empty(options.experts, width, options.hidden))

    def forward(self, x: Tensor, batch: BatchContext) -> Tensor:
        flat = x.flatten(0, 1)
        logits = widen(self.router(flat))
        all_rows = logits.new_ones(len(x), dtype=torch.bool)
        rows = all_rows if batch.rows is None else batch.rows
        text = rows.repeat_interleave(x.shape[1], output_size=len(flat))
        chosen, weights = self.route(logits, batch, text)
        token = torch.arange(len(flat), device=x.device).repeat_interleave(self.options.top_k)
        order = chosen.flatten().argsort(stable=True)
        token = token[order]
        trip = Trip(visits(chosen, self.options.experts).sum(dim=0), batch.axes.experts)
        rows = trip.there(flat[token])
        gate, up = grouped_product(rows, self.gate_up, trip.counts).chunk(2, dim=-1)
        hidden = ACTIVATIONS[self.options.activation](gate) * up
        y = trip.back(grouped_product(hidden, self.down, trip.counts))
        batch.received.append(trip.received)
        weighted = y * weights.flatten()[order].unsqueeze(-1).to(x.dtype)
        y = torch.zeros_like(flat).index_add(0, token, weighted)
        return torch.ops.aten._unsafe_view(y, x.shape)  # FSDP2 warns of modules that return views

    def route(self, logits: Tensor, batch: BatchContext, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token and their weights, both [tokens, k].

        Batch statistics count the tokens where `text` (bool [tokens]) is True.
        """
        options, axis = self.options, batch.axes.context
        softmax = options.router == "softmax"
        probabilities = logits.softmax(dim=-1) if softmax else logits.sigmoid()
        preference = probabilities
        if options.sinkhorn and self.training:
            balanced = sinkhorn(logits.detach(), text, axis)
            preference = torch.where(text.unsqueeze(-1), balanced, probabilities)
        chosen = preference.topk(options.top_k, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        if softmax:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.training and options.balance_loss:
            batch.losses.append(options.balance_loss * balance(probabilities, chosen, text, axis))
        if self.training and options.z_loss:
            squares = (logits.logsumexp(dim=-1).square() * text).sum()
            mean = reduce(squares, axis) / token_count(text, axis).to(squares.dtype)
            batch.losses.append(options.z_loss * mean)
        return chosen, weights

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.router)
        init.matrix(self.gate_up)
        init.output_matrix(self.down)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Shard each expert by its hidden channels: all ranks route all tokens, identically. (Under
        expert parallelism, each rank routes its own tokens, and experts are whole.)"""
        hidden = self.options.hidden
        return {"gate_up": Sharded(1, (hidden, hidden)), "down": Sharded(2)}

    def stacks(self) -> dict[str, tuple[int, ...]]:
        hidden = self.options.hidden
        return {"gate_up": (hidden, hidden), "down": (self.width,)}

    def flops(self, length: int) -> dict[str, float]:
        expert = self.gate_up[0].numel() + self.down[0].numel()
        return {"experts": 2.0 * self.options.top_k * expert}


def visits(chosen: Tensor, experts: int) -> Tensor:
    """int64 [tokens, experts]: how often each token goes to each expert."""
    return (chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)).sum(dim=1)


def token_count(text: Tensor, axis: Axis) -> Tensor:
    """Number of text tokens in all parts of the rows, at least 1: the mean over rows of padding
    alone is then 0, as is their sum."""
    return reduce(text.sum(), axis).clamp(min=1)


def balance(probabilities: Tensor, chosen: Tensor, text: Tensor, axis: Axis = ALONE) -> Tensor:
    """Return the balance loss: top_k if tokens are spread evenly, up to the number of experts if
    few experts get all of them."""
    experts = probabilities.shape[-1]
    counted = text.unsqueeze(-1)
    taken = (visits(chosen, experts) * counted).sum(dim=0).to(probabilities.dtype)
    sums = reduce(torch.cat([taken, (probabilities * counted).sum(dim=0)]), axis)
    taken, likely = (sums / token_count(text, axis).to(sums.dtype)).chunk(2)
    return experts * (taken * likely).sum()


def sinkhorn(logits: Tensor, text: Tensor, axis: Axis = ALONE) -> Tensor:
    """exp(2·logits), scaled so that all text tokens, and all experts, have equal totals."""
    experts = logits.shape[1]
    tokens = token_count(text, axis)
    logits = logits.masked_fill(~text.unsqueeze(-1), float("-inf"))
    top = highest(logits.amax(), axis).clamp(min=torch.finfo(logits.dtype).min)
    weights = torch.exp(2 * (logits - top))
    columns = torch.ones(experts, device=logits.device, dtype=logits.dtype)
    rows = columns.new_ones(len(logits))
    for _ in range(SINKHORN_ROUNDS):
        rows = 1 / (tokens * (weights @ columns) + 1e-8)
        columns = 1 / (experts * reduce(rows @ weights, axis) + 1e-8)
    return weights * columns * rows.unsqueeze(-1)
