"""Mamba-2 options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
    conv: int = 4
    """Taps in the short convolution."""
    chunk: int = 64
    """Tokens per scan block; affects the speed, not the result."""
    norm_eps: float = 1e-5
    """Epsilon in the gated norm before the output."""
    bias: bool = False
    """Add biases in the input and output projections."""

    def steps(self, device: str) -> bool:
        return device != "cuda"

    def problems(self, width: int) -> Iterator[str]:
        inner = self.expand * width
        yield from check_divides("head_dim", self.head_dim, "expand · width", inner)
        if self.head_dim > 0 and inner % self.head_dim == 0:
            yield from check_divides("groups", self.groups, "the heads", inner // self.head_dim)
        if self.norm_groups is not None:
            yield from check_divides("norm_groups", self.norm_groups, "expand · width", inner)
        for name in ("state_size", "conv", "chunk", "expand"):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, not {getattr(self, name)}"
        if not self.norm_eps > 0:
            yield f"norm_eps must be above 0, not {self.norm_eps}"

    def tp_sizes(self, width: int) -> dict[str, int]:
        heads = self.expand * width // self.head_dim
        return {"heads": heads, "channels of B": self.groups * self.state_size}
