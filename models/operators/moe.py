"""Mixture of experts: a router sends each token to a few MLPs among many.

softmax     p = softmax(x·W); the k largest. With k = 1 the weight is p itself (Switch); with more,
            the weights are scaled to sum to one (Mixtral); `normalize` overrides this
sigmoid     p = sigmoid(x·W + b); the largest (BlackMamba). In training, Sinkhorn's iteration
            on exp(2·logits) makes the choice, so that experts get equally many tokens

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
from ..layers.routed_rows import combine, dispatch, sort_choices
from ..parallel.axes import ALONE, Axes, Axis
from ..parallel.experts import ExpertExchange
from ..parallel.local_shard import Sharded, ShardingSpec
from ..parallel.tensor import reduce, reduce_max
from .base import BatchContext, Operator
from .mlp import apply_gate

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
        """Map x [b, t, width] to [b, t, width]."""
        tokens, kernel = x.flatten(0, 1), self.options.kernel
        logits = widen(self.router(tokens)).unflatten(0, x.shape[:2])
        expert_ids, weights = (tensor.flatten(0, 1) for tensor in self.route(logits, batch))
        if batch.routed is not None:
            text_mask = self.text_mask(logits, batch).view(-1, 1)
            batch.routed.append(
                (count_visits(expert_ids, self.options.experts) * text_mask).sum(dim=0)
            )
        row_ids = sort_choices(expert_ids)
        exchange = ExpertExchange(
            count_visits(expert_ids, self.options.experts).sum(dim=0), batch.axes.experts
        )
        rows = exchange.dispatch(dispatch(tokens, row_ids, kernel))
        ends = group_ends(
            exchange.counts, rows, self.gate_up, self.down, on_host=exchange.host_counts
        )
        gate_up = grouped_product(rows, self.gate_up, ends)
        hidden = apply_gate(gate_up, self.options.activation, kernel)
        y = exchange.combine(grouped_product(hidden, self.down, ends))
        if batch.axes.experts.size > 1:
            batch.received.append(exchange.received)
        y = combine(y, row_ids, weights, kernel)
        # Not a view: FSDP2 warns of modules that return views.
        out: Tensor = torch.ops.aten._unsafe_view(y, x.shape)
        return out

    def route(self, logits: Tensor, batch: BatchContext) -> tuple[Tensor, Tensor]:
        """Return expert_ids and weights [rows, length, k] for logits [rows, length, experts]."""
        options, axis = self.options, batch.axes.context
        softmax = options.router == "softmax"
        probs = logits.softmax(dim=-1) if softmax else logits.sigmoid()
        choice_probs = probs
        text_mask = self.text_mask(logits, batch)
        if options.sinkhorn and self.training:
            groups = self.balance_groups(logits.detach()), self.balance_groups(text_mask)
            balanced_probs = sinkhorn(*groups, axis, self.sinkhorn_rounds)
            choice_probs = torch.where(
                text_mask.unsqueeze(-1), balanced_probs.view_as(logits), probs
            )
        expert_ids = choice_probs.topk(options.top_k, dim=-1).indices
        weights = probs.gather(-1, expert_ids)
        if options.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.training and options.balance_loss:
            imbalance = balance_loss(
                self.balance_groups(probs),
                self.balance_groups(expert_ids),
                self.balance_groups(text_mask),
                axis,
            )
            batch.losses.append(options.balance_loss * imbalance.expand(len(logits)))
        if self.training and options.z_loss:
            squared_log_z = reduce(logits.logsumexp(dim=-1).square().sum(dim=1), axis)
            batch.losses.append(options.z_loss / (logits.shape[1] * axis.size) * squared_log_z)
        return expert_ids, weights

    def balance_groups(self, x: Tensor) -> Tensor:
        """Map x [rows, length, …] to [groups, tokens, …]: tokens that are balanced together."""
        return x if self.options.balance_over == "row" else x.flatten(0, 1).unsqueeze(0)

    def text_mask(self, logits: Tensor, batch: BatchContext) -> Tensor:
        """Return bool [rows, length]: False in padding rows."""
        mask = logits.new_ones(logits.shape[:2], dtype=torch.bool)
        return mask if batch.rows is None else mask & batch.rows.unsqueeze(1)

    def untraced(self, axes: Axes, device: torch.device) -> str | None:
        sharded = axes.experts.size > 1
        return "the exchange of rows with experts of other ranks" if sharded else None

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
        num_unused: int = self.options.experts - self.options.top_k
        return num_unused * self.expert_parameters()

    def flops(self, length: int) -> dict[str, float]:
        return {"experts": 2.0 * self.options.top_k * self.expert_parameters()}


def count_visits(expert_ids: Tensor, num_experts: int) -> Tensor:
    """Count how often each token goes to each expert, int64 [..., tokens, experts], for expert_ids
    [..., tokens, k]."""
    return (expert_ids.unsqueeze(-1) == torch.arange(num_experts, device=expert_ids.device)).sum(
        dim=-2
    )


def count_text_tokens(text_mask: Tensor, axis: Axis) -> Tensor:
    """Count text tokens by group [groups] over all context-parallel ranks, at least 1: a mean over
    padding alone is then 0, as is its sum. text_mask [groups, tokens]."""
    return reduce(text_mask.sum(dim=1), axis).clamp(min=1)


def balance_loss(
    probs: Tensor, expert_ids: Tensor, text_mask: Tensor, axis: Axis = ALONE
) -> Tensor:
    """Return the balance loss by group [groups]: top_k if tokens are spread evenly, up to the
    expert count if few experts get all tokens.

    probs [groups, tokens, experts], expert_ids [groups, tokens, k], text_mask [groups, tokens].
    """
    num_experts = probs.shape[-1]
    token_weights = text_mask.unsqueeze(-1)
    visit_shares = (
        (count_visits(expert_ids, num_experts) * token_weights).sum(dim=1).to(probs.dtype)
    )
    sums = reduce(torch.cat([visit_shares, (probs * token_weights).sum(dim=1)], dim=-1), axis)
    visit_shares, mean_probs = (
        sums / count_text_tokens(text_mask, axis).unsqueeze(-1).to(sums.dtype)
    ).chunk(2, dim=-1)
    return num_experts * (visit_shares * mean_probs).sum(dim=-1)


def sinkhorn(
    logits: Tensor, text_mask: Tensor, axis: Axis = ALONE, num_rounds: int = SINKHORN_ROUNDS
) -> Tensor:
    """Scale exp(2·logits) so that in each group all text tokens, and all experts, have equal
    totals: [groups, tokens, experts], like logits; 0 for padding. text_mask [groups, tokens]."""
    num_tokens, num_experts = count_text_tokens(text_mask, axis).unsqueeze(-1), logits.shape[-1]
    logits = logits.masked_fill(~text_mask.unsqueeze(-1), float("-inf"))
    max_logit = reduce_max(logits.amax(dim=(1, 2), keepdim=True), axis)
    weights = torch.exp(2 * (logits - max_logit.clamp(min=torch.finfo(logits.dtype).min)))
    expert_scales = logits.new_ones(len(logits), num_experts)
    token_scales = logits.new_ones(logits.shape[:2])
    for _ in range(num_rounds):
        # Sums of products, not matrix products, which autocast rounds to half precision;
        # `reciprocal`, because 1 / x is two launches.
        expert_sums = (weights * expert_scales.unsqueeze(1)).sum(dim=-1)
        token_scales = (num_tokens * expert_sums + 1e-8).reciprocal()
        token_sums = reduce((weights * token_scales.unsqueeze(-1)).sum(dim=1), axis)
        expert_scales = (num_experts * token_sums + 1e-8).reciprocal()
    return weights * expert_scales.unsqueeze(1) * token_scales.unsqueeze(-1)
