"""Mamba-2 options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ....console.config import added_field
from .base import FusedOptions, check_divides


@dataclass(frozen=True, kw_only=True)
class Mamba2Options(FusedOptions):
    """Mamba-2 (SSD)."""

    kind: Literal["mamba2"] = "mamba2"
    state_size: int = 128
    """N: state elements for each channel."""
    head_dim: int = 64
    """P: channels that share a decay."""
    groups: int = 1
    """B and C are shared by heads/groups heads."""
    norm_groups: int | None = None
    """Groups in the gated norm, each normalised separately; equal to `groups` if unset."""
    expand: int = 2
    """Inner width divided by the model's width."""
    heads: int | None = added_field(None)
    """Heads: the inner width is heads · head_dim. As many as make up `expand` · width if unset."""
    conv: int = 4
    """Taps in the short convolution."""
    chunk: int = 64
    """Tokens per scan block; affects the speed, not the result."""
    norm_eps: float = 1e-5
    """Epsilon in the gated norm before the output."""
    gated_norm: bool = added_field(True)
    """Normalise y·silu(z) before the output. false: Falcon-H1."""
    projection_multipliers: tuple[float, float, float, float, float] | None = added_field(None)
    """Multiply z, x, B, C and Δ after the input projection, as in Falcon-H1."""
    bias: bool = False
    """Add biases in the input and output projections."""

    def steps(self, device: str) -> bool:
        return device != "cuda"

    def problems(self, width: int) -> Iterator[str]:
        if self.heads is None:
            inner_name = "expand · width"
            yield from check_divides("head_dim", self.head_dim, inner_name, self.expand * width)
        else:
            inner_name = "heads · head_dim"
            if self.head_dim < 1 or self.heads < 1:
                yield f"heads ({self.heads}) and head_dim ({self.head_dim}) must be at least 1"
        if self.head_dim > 0:
            heads = self.num_heads(width)
            if heads * self.head_dim == self.inner(width):
                yield from check_divides("groups", self.groups, "the heads", heads)
        if self.norm_groups is not None:
            yield from check_divides("norm_groups", self.norm_groups, inner_name, self.inner(width))
            if not self.gated_norm:
                yield "norm_groups has no effect with gated_norm: false"
        for name in ("state_size", "conv", "chunk", "expand"):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, not {getattr(self, name)}"
        if not self.norm_eps > 0:
            yield f"norm_eps must be above 0, not {self.norm_eps}"

    def inner(self, width: int) -> int:
        """Return the inner width."""
        return self.expand * width if self.heads is None else self.heads * self.head_dim

    def num_heads(self, width: int) -> int:
        return self.inner(width) // self.head_dim

    def tp_sizes(self, width: int) -> dict[str, int]:
        return {"heads": self.num_heads(width), "channels of B": self.groups * self.state_size}
