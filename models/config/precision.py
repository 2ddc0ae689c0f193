"""Number formats of tensors: of a precision, and where arithmetic must be wider than its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .options.precision import Precision


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the format of weights and activations in the forward and backward passes."""
    dtype: torch.dtype = getattr(torch, precision.compute)
    return dtype


def widen(x: Tensor) -> Tensor:
    """Return half-precision tensors as float32, and float32 and float64 tensors unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
