"""Mixture-of-experts options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .base import FusedOptions
from .names import Activation


@dataclass(frozen=True, kw_only=True)
class MoEOptions(FusedOptions):
    """Mixture of experts with gated MLPs."""

    tokenwise = True
    kind: Literal["moe"] = "moe"
    experts: int
    """Number of experts."""
    top_k: int = 2
    """Experts per token."""
    hidden: int
    """Hidden width per expert."""
    activation: Activation = "silu"
    """Activation on each expert's gate."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Function from an expert's score to its weight."""
    normalize: bool | None = None
    """Scale a token's expert weights to sum to one. Default: if the router is softmax and top_k is
    above 1. (With top_k 1 the weight is then always 1, and the tokens' loss does not train the
    router.)"""
    sinkhorn: bool = False
    """Balance the choice in training by Sinkhorn's iteration; evaluation takes the largest."""
    balance_loss: float = 0.0
    """Coefficient of experts · Σ (fraction of tokens) · (mean probability)."""
    balance_over: Literal["row", "micro-batch"] = "row"
    """Tokens over which Sinkhorn and balance_loss count: a row's, or a rank's whole micro-batch.
    With `micro-batch`, another micro_batch_tokens or another number of data-parallel ranks is
    another model."""
    z_loss: float = 0.0
    """Coefficient of log²Σexp(logits), averaged over a row."""

    @property
    def normalizes(self) -> bool:
        """True if a token's expert weights sum to one."""
        if self.normalize is not None:
            return self.normalize
        return self.router == "softmax" and self.top_k > 1

    @property
    def couples_rows(self) -> bool:
        return self.balance_over == "micro-batch" and bool(self.sinkhorn or self.balance_loss)

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
