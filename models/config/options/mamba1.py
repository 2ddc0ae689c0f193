"""Mamba-1 options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .base import FusedOptions, check_divides


@dataclass(frozen=True, kw_only=True)
class Mamba1Options(FusedOptions):
    """Mamba-1 (selective scan)."""

    kind: Literal["mamba1"] = "mamba1"
    state_size: int = 16
    """N: state elements for each channel."""
    heads: int = 1
    """Heads, each with its own B, C and Δ; Zamba has 2."""
    expand: int = 2
    """Inner width divided by the model's width."""
    conv: int = 4
    """Taps in the short convolution."""
    dt_rank: int | None = None
    """⌈width/16⌉ if unset."""
    chunk: int = 32
    """Tokens per scan block; affects the speed, not the result."""

    def steps(self, device: str) -> bool:
        return device != "cuda"

    def problems(self, width: int) -> Iterator[str]:
        yield from check_divides("heads", self.heads, "expand · width", self.expand * width)
        for name in ("state_size", "conv", "chunk", "expand"):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, not {getattr(self, name)}"
        if self.dt_rank is not None and self.dt_rank < 1:
            yield f"dt_rank must be at least 1, not {self.dt_rank}"

    def tp_sizes(self, width: int) -> dict[str, int]:
        return {"channels of a head": self.expand * width // self.heads}

    def rank(self, width: int) -> int:
        return self.dt_rank or -(-width // 16)
