"""Whether a fused kernel runs: what was asked for, the device, and what the kernel can do."""

from __future__ import annotations

import os
import warnings
from typing import Literal

import torch
from torch import Tensor

from ...console.errors import LayoutError

Kernel = Literal["auto", "triton", "torch"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton runs its programs in Python, on any device. It decides when it is imported."""


def chosen(kernel: Kernel, name: str, x: Tensor, problem: str | None = None) -> bool:
    """Whether the kernel of this name is to run.

    `problem` says what is beyond its reach, if something is. Then plain torch runs in its place,
    with a warning; or nothing does, where the kernel was asked for by name.
    """
    if kernel == "torch" or (kernel == "auto" and not x.is_cuda):
        return False
    if not (x.is_cuda or INTERPRETED):
        problem = f"the tensors are on {x.device.type}, and Triton runs on a GPU"
    elif x.dtype not in TYPES:
        problem = f"it is made for fp32, bf16 and fp16, not {x.dtype}"
    if problem is None:
        return True
    if kernel == "triton":
        raise LayoutError(
            f"the kernel {name} cannot do this: {problem}",
            mend="`kernel: auto` takes plain torch where the kernel does not reach",
        )
    warnings.warn(f"{name} runs as plain torch: {problem}", RuntimeWarning, stacklevel=3)
    return False
