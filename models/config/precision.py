"""Tensor dtypes: a precision's compute dtype, and arithmetic wider than its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .options.precision import Precision


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the weight and activation dtype in forward and backward passes."""
    dtype: torch.dtype = getattr(torch, precision.compute)
    return dtype


def widen(x: Tensor) -> Tensor:
    """Convert half-precision tensors to float32; return float32 and float64 tensors unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
