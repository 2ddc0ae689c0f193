"""Routing: which experts take a token. Balance of the experts, and their capacity.

Statistics cover a group: a row on all ranks of the context axis, or a whole micro-batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..parallel.axes import ALONE, Axis
from ..parallel.collectives import all_gather
from ..parallel.tensor import reduce, reduce_max
from .routed_rows import sort_choices

SINKHORN_ROUNDS = 32
SCORED_EXPERTS = 2
"""Experts whose scores make a group's score."""


def mask_groups(scores: Tensor, groups: int, top_k_groups: int) -> Tensor:
    """Set the scores of experts outside each token's `top_k_groups` best groups to −∞. scores
    [..., experts]; a group's score is the sum of its two largest."""
    grouped = scores.unflatten(-1, (groups, -1))
    largest = grouped.topk(min(SCORED_EXPERTS, grouped.shape[-1]), dim=-1).values
    chosen = largest.sum(dim=-1).topk(top_k_groups, dim=-1).indices
    mask = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, chosen, False)
    masked: Tensor = grouped.masked_fill(mask.unsqueeze(-1), float("-inf")).flatten(-2)
    return masked


def within_capacity(expert_ids: Tensor, num_experts: int, factor: float, axis: Axis) -> Tensor:
    """Return bool like expert_ids [rows, length, k]: False for choices beyond an expert's capacity,
    factor · k · length / num_experts of a row's choices, rounded up. Earlier tokens come first,
    also those on earlier ranks of the axis."""
    rows, length, k = expert_ids.shape
    capacity = math.ceil(factor * k * length * axis.size / num_experts)
    row = torch.arange(rows, device=expert_ids.device).view(-1, 1, 1)
    queues = expert_ids + num_experts * row
    counts = count_visits(expert_ids, num_experts).sum(dim=1)
    starts = counts.flatten().cumsum(0) - counts.flatten()
    places = sort_choices(queues.flatten(0, 1)).view_as(queues) - starts[queues]
    if axis.size > 1:
        earlier = all_gather(counts, axis)[: axis.rank].sum(dim=0)
        places = places + earlier.flatten()[queues]
    return places < capacity


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
