"""Arithmetic in a wider type than that of the inputs."""

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """Convert half precisions to float32; leave float32 and float64 unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
