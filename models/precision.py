"""Where the arithmetic must be wider than the tensors that come in."""

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """float32 for half precisions; float32 and float64 stay what they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
