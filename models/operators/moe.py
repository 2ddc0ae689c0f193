"""Mixture of experts: a router sends each token to a few of many MLPs.

softmax     p = softmax(x·W); the k largest. With k = 1 the weight is p itself (Switch); with more,
            the weights are scaled to sum to one (Mixtral); `normalize` overrides this
sigmoid     p = sigmoid(x·W + b); the largest (BlackMamba). In training, Sinkhorn's iteration
            on exp(2·logits) makes the choice, so that experts get equal numbers of tokens

y = Σ_chosen p_e · (act(x·W_gate,e) ⊙ x·W_up,e)·W_down,e

Experts are balanced over each row by itself, so the model does not depend on how rows are divided
into micro-batches or among ranks. `balance_over: micro-batch` gives that up.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config.options.moe import MoEOptions
from ..config.precision import widen
from ..layers.grouped import group_ends, grouped_product
from ..layers.initializers import Initializers
from ..layers.routed_rows import collect, places_of, spread
from ..parallel.axes import ALONE, Axes, Axis
from ..parallel.experts import Trip
from ..parallel.local_shard import Sharded, ShardingSpec
from ..parallel.tensor import highest, reduce
from .base import BatchContext, Operator
from .mlp import gated

SINKHORN_ROUNDS = 32


class MoE(Operator):
    Options = MoEOptions
    experts = ("gate_up", "down")

    def __init__(self, options: MoEOptions, width: int) -> None:
        super().__init__(options, width)
        self.router = nn.Linear(width, options.experts, bias=options.router == "sigmoid")
        self.gate_up = nn.Parameter(torch.empty(options.experts, 2 * options.hidden, width))
        self.down = nn.Parameter(torch.empty(options.experts, width, options.hidden))
        self.sinkhorn_rounds = SINKHORN_ROUNDS

    def forward(self, x: Tensor, batch: BatchContext) -> Tensor:
        flat, kernel = x.flatten(0, 1), self.options.kernel
        logits = widen(self.router(flat)).unflatten(0, x.shape[:2])
        chosen, weights = (each.flatten(0, 1) for each in self.route(logits, batch))
        if batch.routed is not None:
            text = self.text(logits, batch).view(-1, 1)
            batch.routed.append((visits(chosen, self.options.experts) * text).sum(dim=0))
        places = places_of(chosen)
        trip = Trip(visits(chosen, self.options.experts).sum(dim=0), batch.axes.experts)
        rows = trip.there(spread(flat, places, kernel))
        ends = group_ends(trip.counts, rows, self.gate_up, self.down, on_host=trip.on_host)
        gate_up = grouped_product(rows, self.gate_up, ends)
        hidden = gated(gate_up, self.options.activation, kernel)
        y = trip.back(grouped_product(hidden, self.down, ends))
        if batch.axes.experts.size > 1:
            batch.received.append(trip.received)
        y = collect(y, places, weights, kernel)
        # Not a view: FSDP2 warns of modules that return views.
        result: Tensor = torch.ops.aten._unsafe_view(y, x.shape)
        return result

    def route(self, logits: Tensor, batch: BatchContext) -> tuple[Tensor, Tensor]:
        """Return the experts of each token and their weights, both [rows, length, k]."""
        options, axis = self.options, batch.axes.context
        softmax = options.router == "softmax"
        probabilities = logits.softmax(dim=-1) if softmax else logits.sigmoid()
        preference = probabilities
        text = self.text(logits, batch)
        if options.sinkhorn and self.training:
            groups = self.groups(logits.detach()), self.groups(text)
            shares = sinkhorn(*groups, axis, self.sinkhorn_rounds)
            preference = torch.where(text.unsqueeze(-1), shares.view_as(logits), probabilities)
        chosen = preference.topk(options.top_k, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        if options.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.training and options.balance_loss:
            uneven = balance(
                self.groups(probabilities), self.groups(chosen), self.groups(text), axis
            )
            batch.losses.append(options.balance_loss * uneven.expand(len(logits)))
        if self.training and options.z_loss:
            squares = reduce(logits.logsumexp(dim=-1).square().sum(dim=1), axis)
            batch.losses.append(options.z_loss / (logits.shape[1] * axis.size) * squares)
        return chosen, weights

    def groups(self, x: Tensor) -> Tensor:
        """[rows, length, …] → [groups, tokens, …]: the tokens that are balanced together."""
        return x if self.options.balance_over == "row" else x.flatten(0, 1).unsqueeze(0)

    def text(self, logits: Tensor, batch: BatchContext) -> Tensor:
        """Return bool [rows, length]: False for tokens of padding rows."""
        text = logits.new_ones(logits.shape[:2], dtype=torch.bool)
        return text if batch.rows is None else text & batch.rows.unsqueeze(1)

    def untraced(self, axes: Axes, device: torch.device) -> str | None:
        split = axes.experts.size > 1
        return "the exchange of rows with experts of other ranks" if split else None

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

    def expert_parameters(self) -> int:
        return self.gate_up[0].numel() + self.down[0].numel()

    def unused_parameters(self) -> int:
        unused: int = self.options.experts - self.options.top_k
        return unused * self.expert_parameters()

    def flops(self, length: int) -> dict[str, float]:
        return {"experts": 2.0 * self.options.top_k * self.expert_parameters()}


def visits(chosen: Tensor, experts: int) -> Tensor:
    """int64 [..., tokens, experts]: how often each token goes to each expert."""
    return (chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)).sum(dim=-2)


def token_count(text: Tensor, axis: Axis) -> Tensor:
    """Number of text tokens of each group in all parts of its rows, at least 1: the mean over
    padding alone is then 0, as is its sum."""
    return reduce(text.sum(dim=1), axis).clamp(min=1)


def balance(probabilities: Tensor, chosen: Tensor, text: Tensor, axis: Axis = ALONE) -> Tensor:
    """Return the balance loss of each group: top_k if its tokens are spread evenly, up to the
    number of experts if few experts get all of them."""
    experts = probabilities.shape[-1]
    counted = text.unsqueeze(-1)
    taken = (visits(chosen, experts) * counted).sum(dim=1).to(probabilities.dtype)
    sums = reduce(torch.cat([taken, (probabilities * counted).sum(dim=1)], dim=-1), axis)
    taken, likely = (sums / token_count(text, axis).unsqueeze(-1).to(sums.dtype)).chunk(2, dim=-1)
    return experts * (taken * likely).sum(dim=-1)


def sinkhorn(
    logits: Tensor, text: Tensor, axis: Axis = ALONE, rounds: int = SINKHORN_ROUNDS
) -> Tensor:
    """exp(2·logits), scaled so that in each group all text tokens, and all experts, have equal
    totals. Padding gives zeros."""
    tokens, experts = token_count(text, axis).unsqueeze(-1), logits.shape[-1]
    logits = logits.masked_fill(~text.unsqueeze(-1), float("-inf"))
    top = highest(logits.amax(dim=(1, 2), keepdim=True), axis)
    weights = torch.exp(2 * (logits - top.clamp(min=torch.finfo(logits.dtype).min)))
    columns = logits.new_ones(len(logits), experts)
    rows = logits.new_ones(logits.shape[:2])
    for _ in range(rounds):
        # Sums of products, not matrix products, which autocast rounds to half precision;
        # `reciprocal`, because 1 / x is two launches.
        by_expert = (weights * columns.unsqueeze(1)).sum(dim=-1)
        rows = (tokens * by_expert + 1e-8).reciprocal()
        by_token = reduce((weights * rows.unsqueeze(-1)).sum(dim=1), axis)
        columns = (experts * by_token + 1e-8).reciprocal()
    return weights * columns.unsqueeze(1) * rows.unsqueeze(-1)
