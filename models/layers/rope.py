"""Rotary position embedding: in a head, pairs (i, i + d/2) turn by position · frequency_i.

Frequencies are base^(−2i/d); a scaling changes them for contexts longer than those trained. With
`proportion`, those of the last pairs are 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config.options.names import Kernel
from ..config.options.rope import Rope
from ..kernels import rope as rope_kernel
from ..kernels.choice import uses_kernel


def frequencies(rope: Rope, head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """Return frequencies, fp32 [head_dim / 2], and a factor that scales rotated vectors (yarn)."""
    scaled, amplitude = scaled_frequencies(rope, head_dim, device)
    if rope.proportion < 1:
        num_turning = int(rope.proportion * head_dim // 2)
        pair = torch.arange(head_dim // 2, device=device)
        scaled = scaled.where(pair < num_turning, 0.0)
    return scaled, amplitude


def scaled_frequencies(rope: Rope, head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """Return `frequencies` of a rotation in which all pairs turn."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    if rope.scaling == "ntk":
        base = rope.base * rope.factor ** (head_dim / (head_dim - 2))
        return base**-exponent, 1.0
    base_frequencies = rope.base**-exponent
    if rope.scaling == "linear":
        return base_frequencies / rope.factor, 1.0
    if rope.scaling == "yarn":
        betas = [rope.beta_fast, rope.beta_slow]
        first, last = (
            head_dim
            * math.log(rope.original_length / (beta * 2 * math.pi))
            / (2 * math.log(rope.base))
            for beta in betas
        )
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        pair = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
        stretch = ((pair - first) / (last - first or 0.001)).clamp(0, 1)
        blended = base_frequencies / rope.factor * stretch + base_frequencies * (1 - stretch)
        return blended, yarn_amplitude(rope)
    if rope.scaling == "llama3":
        num_turns = rope.original_length * base_frequencies / (2 * math.pi)
        transition = rope.high_freq_factor - rope.low_freq_factor
        weight = ((num_turns - rope.low_freq_factor) / transition).clamp(0, 1)
        return base_frequencies * weight + base_frequencies / rope.factor * (1 - weight), 1.0
    return base_frequencies, 1.0


def yarn_amplitude(rope: Rope) -> float:
    """Return the factor of queries and keys that turn by yarn's frequencies."""
    return rope.attention_factor or 0.1 * math.log(rope.factor) + 1


def rotation(rope: Rope, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, fp32 [rows, length, 1, head_dim / 2]; positions [rows, length]."""
    frequency, amplitude = frequencies(rope, head_dim, positions.device)
    angle = positions.unsqueeze(-1).float() * frequency
    return (angle.cos() * amplitude).unsqueeze(2), (angle.sin() * amplitude).unsqueeze(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, kernel: Kernel = "auto") -> Tensor:
    """Rotate x [rows, length, heads, head_dim] by angles [rows or 1, length, 1, half]. Angles are
    fp32, products fp32 or wider; channels from 2·half on stay."""
    if uses_kernel(kernel, "rope", x):
        fused: Tensor = rope_kernel.rope(x, cos, sin, False)
        return fused
    return plain(x, cos, sin)


def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Torch twin of the kernel; shapes as in `rotate`."""
    half = cos.shape[-1]
    a, b, unrotated = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin, unrotated], dim=-1)
    return rotated.to(x.dtype)
