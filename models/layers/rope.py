"""Rotary position embedding: pairs (i, i + d/2) of a head turn by position · frequency_i.

Frequencies are base^(−2i/d); a scaling changes them for contexts longer than those trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..kernels import rope as rope_kernel
from ..kernels.choice import Kernel, chosen


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding and its scaling."""

    base: float = 10_000.0
    """Also called theta."""
    channels: int | None = None
    """Number of channels of a head that turn, from the first; all if unset."""
    scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"
    """`linear`: positions divided by `factor`; `ntk`: a larger base; `yarn`: slow frequencies
    divided by `factor`, fast ones kept, a ramp between; `llama3`: the same by wavelength."""
    factor: float = 1.0
    """Length of the new context divided by `original_length`."""
    original_length: int = 8192
    """Context length of the first training; used by `yarn` and `llama3`."""
    beta_fast: float = 32.0
    """`yarn`: turns within `original_length` above which a frequency is kept."""
    beta_slow: float = 1.0
    """`yarn`: turns within `original_length` below which a frequency is divided."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above `original_length` / low_freq_factor are stretched in full."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths below `original_length` / high_freq_factor are kept."""

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, not {self.factor}")
        if self.scaling == "none" and self.factor != 1:
            raise ValueError(f"factor {self.factor} needs a `scaling`: linear, ntk, yarn or llama3")
        if not self.base > 1:
            raise ValueError(f"base must be above 1, not {self.base}")
        if self.original_length < 1:
            raise ValueError(f"original_length must be at least 1, not {self.original_length}")
        for high, low in (("beta_fast", "beta_slow"), ("high_freq_factor", "low_freq_factor")):
            if not getattr(self, high) > getattr(self, low) > 0:
                ends = f"{high} ({getattr(self, high)}) and {low} ({getattr(self, low)})"
                raise ValueError(f"{ends} must be above 0, and the first the larger")


def frequencies(rope: Rope, dim: int, device: torch.device) -> tuple[Tensor, float]:
    """Frequencies, fp32 [dim / 2], and the factor that scales rotated vectors (yarn)."""
    exponent = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    if rope.scaling == "ntk":
        base = rope.base * rope.factor ** (dim / (dim - 2))
        return base**-exponent, 1.0
    plain = rope.base**-exponent
    if rope.scaling == "linear":
        return plain / rope.factor, 1.0
    if rope.scaling == "yarn":
        turns = [rope.beta_fast, rope.beta_slow]
        low, high = (
            dim * math.log(rope.original_length / (n * 2 * math.pi)) / (2 * math.log(rope.base))
            for n in turns
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        index = torch.arange(dim // 2, device=device, dtype=torch.float32)
        stretched = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
        mixed = plain / rope.factor * stretched + plain * (1 - stretched)
        return mixed, 0.1 * math.log(rope.factor) + 1
    if rope.scaling == "llama3":
        turns_made = rope.original_length * plain / (2 * math.pi)
        width = rope.high_freq_factor - rope.low_freq_factor
        kept = ((turns_made - rope.low_freq_factor) / width).clamp(0, 1)
        return plain * kept + plain / rope.factor * (1 - kept), 1.0
    return plain, 1.0


def rotation(rope: Rope, positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, fp32 [rows, length, 1, dim / 2]."""
    speed, length = frequencies(rope, dim, positions.device)
    angle = positions.unsqueeze(-1).float() * speed
    return (angle.cos() * length).unsqueeze(2), (angle.sin() * length).unsqueeze(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, kernel: Kernel = "auto") -> Tensor:
    """Rotate x [rows, length, heads, dim]; angles are fp32, products fp32 or wider."""
    if chosen(kernel, "rope", x):
        fused: Tensor = rope_kernel.rope(x, cos, sin, False)
        return fused
    return plain(x, cos, sin)


def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Reference implementation of the kernel in torch."""
    half = cos.shape[-1]
    a, b, still = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin, still], dim=-1)
    return turned.to(x.dtype)
