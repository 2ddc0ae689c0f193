"""MLP options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ....console.config import added_field
from .base import FusedOptions, OperatorOptions
from .names import Activation


@dataclass(frozen=True, kw_only=True)
class MLPOptions(OperatorOptions):
    """Plain: act(x·W)·W_out."""

    tokenwise = True
    kind: Literal["mlp"] = "mlp"
    hidden: int
    """Width between the two projections."""
    activation: Activation = "gelu-tanh"
    """Activation between the two projections."""
    bias: bool = False
    """Add biases in the projections."""

    def problems(self, width: int) -> Iterator[str]:
        if self.hidden < 1:
            yield f"hidden must be at least 1, not {self.hidden}"


@dataclass(frozen=True, kw_only=True)
class GLUOptions(FusedOptions):
    """Gated: (act(x·W_gate) ⊙ x·W_up)·W_out."""

    tokenwise = True
    kind: Literal["glu"] = "glu"
    hidden: int
    """Width between the two projections."""
    activation: Activation = "silu"
    """silu for SwiGLU, gelu for GEGLU; `identity` reproduces the released Evo 2 models."""
    bias: bool = False
    """Add biases in the projections."""
    gate_multiplier: float = added_field(1.0)
    """Multiplies x·W_gate before the activation, as in Falcon-H1."""

    def problems(self, width: int) -> Iterator[str]:
        if self.hidden < 1:
            yield f"hidden must be at least 1, not {self.hidden}"
