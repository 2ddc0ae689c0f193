"""Mixture-of-experts options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ....console.config import added_field
from .base import FusedOptions, check_divides
from .names import Activation


@dataclass(frozen=True, kw_only=True)
class MoEOptions(FusedOptions):
    """Mixture of experts, and a shared expert for all tokens."""

    tokenwise = True
    kind: Literal["moe"] = "moe"
    experts: int
    """Number of experts."""
    top_k: int = 2
    """Experts per token."""
    hidden: int
    """Hidden width per expert."""
    activation: Activation = "silu"
    """Activation on each expert's gate, or on its hidden channels without one."""
    gated: bool = added_field(True)
    """Experts compute (act(x·W_gate) ⊙ x·W_up)·W_down; false: act(x·W_up)·W_down (Nemotron)."""
    bias: bool = added_field(False)
    """Add biases in the experts' projections (gpt-oss)."""
    glu_limit: float | None = added_field(None)
    """Before the activation, clamp gates to at most this, and ups to ± this (gpt-oss: 7)."""
    glu_offset: float = added_field(0.0)
    """Added to the ups: act(gate) ⊙ (up + offset) (gpt-oss: 1)."""
    shared_hidden: int | None = added_field(None)
    """Hidden width of a shared expert, an MLP like the experts, without biases and clamps, whose
    output is added for every token; none if unset. (Several shared experts are a wider one.)"""
    shared_gate: bool = added_field(False)
    """Multiply the shared expert's output by sigmoid(x·w) (Qwen3-Next)."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Function from an expert's score to its weight."""
    router_bias: bool | None = added_field(None)
    """Add a trained bias to the router's scores. Default: if the router is sigmoid."""
    router_fp32: bool = added_field(False)
    """Compute the router's product in fp32, also where the model computes in half precision."""
    bias_update_rate: float | None = added_field(None)
    """Add a bias to the weights when experts are chosen, and to nothing else: DeepSeek V3's
    e_score_correction_bias. After each step it rises by this rate for experts with fewer tokens
    than the mean, and falls for those with more. 0 keeps it; null: no such bias."""
    groups: int = added_field(1)
    """Groups of neighbouring experts; a token's experts lie in its `top_k_groups` best groups, by
    the sum of a group's two largest weights (n_group)."""
    top_k_groups: int = added_field(1)
    """Groups per token (topk_group)."""
    normalize: bool | None = None
    """Scale a token's expert weights to sum to one. Default: if the router is softmax and top_k is
    above 1. (With top_k 1 the weight is then always 1, and the tokens' loss does not train the
    router.)"""
    routed_scaling_factor: float = added_field(1.0)
    """Factor on a token's expert weights, after `normalize`."""
    capacity_factor: float | None = added_field(None)
    """In training, an expert takes at most capacity_factor · top_k · length / experts tokens of a
    row, the first ones; later ones skip the expert, with the weight 0. null: no limit."""
    sinkhorn: bool = False
    """Balance the choice in training by Sinkhorn's iteration; evaluation takes the largest."""
    balance_loss: float = 0.0
    """Coefficient of experts · Σ (fraction of tokens) · (mean probability). The probabilities of a
    sigmoid router are its weights, scaled to sum to one."""
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
    def has_router_bias(self) -> bool:
        return self.router == "sigmoid" if self.router_bias is None else self.router_bias

    @property
    def couples_rows(self) -> bool:
        return self.balance_over == "micro-batch" and bool(self.sinkhorn or self.balance_loss)

    @property
    def expert_count(self) -> int:
        return self.experts

    def keep_experts(self, number: int) -> MoEOptions:
        """Return the options of a rank with so many of the experts."""
        experts = max(number, self.top_k)
        return replace(self, experts=experts, groups=1, top_k_groups=1)

    def problems(self, width: int) -> Iterator[str]:
        if self.hidden < 1:
            yield f"hidden must be at least 1, not {self.hidden}"
        if self.shared_hidden is not None and self.shared_hidden < 1:
            yield f"shared_hidden must be at least 1, not {self.shared_hidden}"
        if self.shared_gate and self.shared_hidden is None:
            yield "shared_gate needs a shared expert (`shared_hidden`)"
        if not 1 <= self.top_k <= self.experts:
            yield f"top_k ({self.top_k}) must lie between 1 and experts ({self.experts})"
        yield from self._group_problems()
        for name in ("balance_loss", "z_loss", "bias_update_rate"):
            if (getattr(self, name) or 0) < 0:
                yield f"{name} must not be below 0: {getattr(self, name)}"
        for name in ("glu_limit", "capacity_factor"):
            value: Any = getattr(self, name)
            if value is not None and not value > 0:
                yield f"{name} must be above 0, not {value}"
        if not self.gated and (self.glu_limit is not None or self.glu_offset):
            yield "glu_limit and glu_offset belong to gated experts"
        if self.sinkhorn and (self.bias_update_rate is not None or self.groups > 1):
            yield "Sinkhorn chooses the experts, and so do bias_update_rate and groups: take one"
        if self.router == "sigmoid" and self.sinkhorn and self.balance_loss:
            yield "Sinkhorn balances a sigmoid router, and so does balance_loss: take one"

    def _group_problems(self) -> Iterator[str]:
        problems = list(check_divides("groups", self.groups, "experts", self.experts))
        yield from problems
        if problems:
            return
        if not 1 <= self.top_k_groups <= self.groups:
            number, groups = self.top_k_groups, self.groups
            yield f"top_k_groups ({number}) must lie between 1 and groups ({groups})"
        elif self.top_k > (choices := self.top_k_groups * (self.experts // self.groups)):
            yield f"top_k ({self.top_k}) is above the {choices} experts of top_k_groups groups"
