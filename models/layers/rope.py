"""Rotary position embedding: pairs (i, i + d/2) of a head turn by position · frequency_i.

Frequencies are base^(−2i/d); a scaling changes them for contexts longer than those trained.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config.options.names import Kernel
from ..config.options.rope import Rope
from ..kernels import rope as rope_kernel
from ..kernels.choice import uses_kernel


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
    if uses_kernel(kernel, "rope", x):
        fused: Tensor = rope_kernel.rope(x, cos, sin, False)
        return fused
    return plain(x, cos, sin)


def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Reference implementation of the kernel in torch."""
    half = cos.shape[-1]
    a, b, still = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin, still], dim=-1)
    return turned.to(x.dtype)
