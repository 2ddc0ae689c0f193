"""Attention options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ....console.config import added_field
from .base import FusedOptions, check_divides
from .rope import Rope


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(FusedOptions):
    """Multi-head and grouped-query attention."""

    kind: Literal["attention"] = "attention"
    heads: int
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads, each shared by heads/kv_heads query heads; `heads` if unset."""
    head_dim: int | None = None
    """width / heads if unset."""
    rope: Rope | None = field(default_factory=Rope)
    """null for none."""
    window: int | None = None
    """Tokens that a query sees, itself included; its whole past if unset."""
    qk_norm: bool = False
    """Apply RMSNorm to queries and keys before rotating them."""
    qk_norm_eps: float = added_field(1e-6)
    """Epsilon in `qk_norm`."""
    qk_norm_over: Literal["head", "projection"] = added_field("head")
    """What `qk_norm` normalises: each head, or all heads together (as in OLMo 2)."""
    qk_norm_kind: Literal["rms", "rms-zero-centered"] = added_field("rms")
    """`qk_norm`'s weight: w, or 1 + w."""
    softmax_scale: float | None = added_field(None)
    """Multiplies the scores before the softmax; head_dim^−½ if unset."""
    sinks: bool = added_field(False)
    """Add to each head's softmax a learned score without a value, as gpt-oss does. On a GPU it
    runs as plain torch."""
    output_gate: bool = added_field(False)
    """Multiply the heads' outputs by sigmoid(x·W_gate), as Qwen3-Next does."""
    output_gate_per: Literal["channel", "head"] = added_field("channel")
    """Gates of `output_gate`: for each channel, or one for each head (LFM3)."""
    qkv_bias: bool = False
    """Add a bias in the projections to queries, keys and values."""
    output_bias: bool = False
    """Add a bias in the output projection."""

    def problems(self, width: int) -> Iterator[str]:
        if self.head_dim is None:
            yield from check_divides("heads", self.heads, "the width", width)
        elif self.head_dim < 1 or self.heads < 1:
            yield f"heads ({self.heads}) and head_dim ({self.head_dim}) must be at least 1"
        if self.kv_heads is not None:
            yield from check_divides("kv_heads", self.kv_heads, "heads", self.heads)
        if self.rope is not None and self.heads > 0:
            yield from self.rope.problems(self.dim(width))
        if self.output_gate_per != "channel" and not self.output_gate:
            yield f"output_gate_per ({self.output_gate_per}) needs `output_gate: true`"
        if not self.qk_norm_eps > 0:
            yield f"qk_norm_eps must be above 0, not {self.qk_norm_eps}"
        if self.softmax_scale is not None and not self.softmax_scale > 0:
            yield f"softmax_scale must be above 0, not {self.softmax_scale}"
        if self.window is not None and self.window < 1:
            yield f"window must be at least 1 token, not {self.window}"

    def tp_sizes(self, width: int) -> dict[str, int]:
        channels = (self.kv_heads or self.heads) * self.dim(width)
        return {"heads": self.heads, "channels of keys": channels}

    @property
    def attention_heads(self) -> int:
        return self.heads

    def dim(self, width: int) -> int:
        return self.head_dim or width // self.heads
