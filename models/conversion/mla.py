"""Latent attention as DeepSeek V3 and Kimi Linear store it.

Their heads have the channels without positions first, and turn pairs of neighbours (2i, 2i+1) if
`interleaved`; ours have the channels that turn first, in pairs (i, i + d/2). A score is a sum over
channels: with rows reordered, the function is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config.options.mla import MLAOptions
from .rules import Rule, map_reshaped, map_same


def mla_rules(ours: str, theirs: str, options: MLAOptions, *, interleaved: bool) -> list[Rule]:
    """Map an operator's tensors; `ours` and `theirs` are the modules' paths."""
    nope, turning = options.qk_nope_head_dim, options.qk_rope_head_dim
    turned = turn_order(turning, interleaved=interleaved)
    head = torch.cat([nope + turned, torch.arange(nope)])
    shared = torch.cat([torch.arange(options.kv_lora_rank), options.kv_lora_rank + turned])
    keys = torch.arange(nope), nope + torch.arange(options.v_head_dim)
    heads = options.heads
    q_order = head_rows(head, heads, nope + turning)
    kv_order = torch.cat([head_rows(part, heads, nope + options.v_head_dim) for part in keys])
    if options.q_lora_rank is None:
        rules = [_map_ordered(f"{ours}.q_b.weight", f"{theirs}.q_proj.weight", q_order)]
    else:
        rules = [
            map_same(f"{ours}.q_a.weight", f"{theirs}.q_a_proj.weight"),
            map_same(f"{ours}.q_a_norm.weight", f"{theirs}.q_a_layernorm.weight"),
            _map_ordered(f"{ours}.q_b.weight", f"{theirs}.q_b_proj.weight", q_order),
        ]
    return [
        *rules,
        _map_ordered(f"{ours}.kv_a.weight", f"{theirs}.kv_a_proj_with_mqa.weight", shared),
        map_same(f"{ours}.kv_a_norm.weight", f"{theirs}.kv_a_layernorm.weight"),
        _map_ordered(f"{ours}.kv_b.weight", f"{theirs}.kv_b_proj.weight", kv_order),
        map_same(f"{ours}.out.weight", f"{theirs}.o_proj.weight"),
    ]


def turn_order(channels: int, *, interleaved: bool) -> Tensor:
    """Return their channels in our order, which puts the first of each pair before all seconds."""
    order = torch.arange(channels)
    return order.view(-1, 2).T.flatten() if interleaved else order


def head_rows(order: Tensor, heads: int, channels: int) -> Tensor:
    """Return the rows `order` of each head's `channels` rows, head by head."""
    return (torch.arange(heads).unsqueeze(1) * channels + order).flatten()


def _map_ordered(ours: str, theirs: str, order: Tensor) -> Rule:
    """Map a matrix whose row i is their row order[i]."""
    inverse = order.argsort()
    return map_reshaped(ours, theirs, lambda t: t[inverse], lambda t: t[order])
