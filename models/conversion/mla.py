"""Latent attention as DeepSeek V3 and Kimi Linear store it.

Their heads have the channels without positions first, and turn pairs of neighbours (2i, 2i+1) if
`interleaved`; ours have the channels that turn first, in pairs (i, i + d/2). A score is a sum over
channels: with rows reordered, the function is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config.options.mla import MLAOptions
from .family import refuse
from .keys import Computed, Field
from .names import Names, Rows, RuleOf, Target, reordered
from .rules import Rule, map_reshaped


def mla_sizes(kv_heads: int) -> Mapping[str, Field | str]:
    """Return the fields of sizes; `kv_heads` is the class's default, which must equal the heads."""

    def read_heads(settings: Mapping[str, Any]) -> int:
        heads = int(settings["num_attention_heads"])
        value = settings.get("num_key_value_heads", kv_heads)
        if value not in (None, heads):
            refuse("num_key_value_heads", f"{value} is not num_attention_heads ({heads})")
        return heads

    heads = Computed(
        read_heads,
        lambda value, options, width: {"num_attention_heads": value, "num_key_value_heads": value},
    )
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {**{name: name for name in sizes}, "heads": heads}


def mla_names(*, interleaved: bool) -> Names:
    """Return the names of an operator's tensors."""
    return {
        "q_a": "q_a_proj",
        "q_b": query_rows(interleaved),
        "q_a_norm": "q_a_layernorm",
        "kv_a": latent_rows(interleaved),
        "kv_a_norm": "kv_a_layernorm",
        "kv_b": reordered("kv_b_proj", of="kv_b", order=order_keys),
        "out": "o_proj",
    }


def turn_order(channels: int, *, interleaved: bool) -> Tensor:
    """Return our channels in their order, in which the channels of a pair may be neighbours."""
    order = torch.arange(channels)
    return order.view(2, -1).T.flatten() if interleaved else order


def query_rows(interleaved: bool) -> RuleOf:
    """Return the rule of the queries, which are projected from their latent, or from the input."""

    def order(rows: Rows, options: MLAOptions) -> list[Tensor]:
        heads, turning = rows["q"].view(options.heads, -1), options.qk_rope_head_dim
        turned = heads[:, turn_order(turning, interleaved=interleaved)]
        return [torch.cat([heads[:, turning:], turned], dim=1).flatten()]

    def rule(target: Target) -> Rule:
        options: Any = target.options
        name = "q_proj" if options.q_lora_rank is None else "q_b_proj"
        return reordered(name, of="q_b", order=order)(target)

    return rule


def latent_rows(interleaved: bool) -> RuleOf:
    """Return the rule of the latents of keys and values, and of the keys that turn."""

    def rule(target: Target) -> Rule:
        options: Any = target.options
        turned = turn_order(options.qk_rope_head_dim, interleaved=interleaved)
        rank = options.kv_lora_rank
        order = torch.cat([torch.arange(rank), rank + turned])
        inverse = order.argsort()
        name = target.name("kv_a_proj_with_mqa")
        return map_reshaped(target.ours, name, lambda t: t[order], lambda t: t[inverse])

    return rule


def order_keys(rows: Rows, options: MLAOptions) -> list[Tensor]:
    """Return each head's keys, then its values."""
    parts = [rows[name].view(options.heads, -1) for name in ("k", "v")]
    return [torch.cat(parts, dim=1).flatten()]
