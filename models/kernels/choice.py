"""Whether a fused kernel runs: what was asked for, the device, and what the kernel can do."""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...console.errors import LayoutError

Kernel = Literal["auto", "triton", "torch"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton runs its programs in Python, on any device. It decides when it is imported."""


def wanted(kernel: Kernel, device: torch.device) -> bool:
    """Whether kernels are asked for, on such a device."""
    return kernel == "triton" or (kernel == "auto" and device.type == "cuda")


def chosen(kernel: Kernel, name: str, x: Tensor, problem: str | None = None) -> bool:
    """Whether the kernel of this name is to run.

    `problem` says what is beyond its reach, if something is. Then plain torch runs in its place,
    with a warning; or nothing does, where the kernel was asked for by name.
    """
    if not wanted(kernel, x.device):
        return False
    if x.dtype not in TYPES:
        problem = f"it is made for fp32, bf16 and fp16, not {x.dtype}"
    if not is_compiling():  # a graph has no use for what the driver says
        problem = unfit(x.device) or problem
    if problem is None:
        return True
    if kernel == "triton":
        raise LayoutError(
            f"the kernel {name} cannot do this: {problem}",
            hint="`kernel: auto` takes plain torch where the kernel does not reach",
        )
    warnings.warn(f"{name} runs as plain torch: {problem}", RuntimeWarning, stacklevel=3)
    return False


def unfit(device: torch.device) -> str | None:
    """What keeps all kernels from a device."""
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"the tensors are on {device.type}, and Triton runs on a GPU"
    return _unfit(device)


@cache
def _unfit(gpu: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "they are made for GPUs of NVIDIA, and this is one of AMD"
    capability = torch.cuda.get_device_capability(gpu)
    if capability < (8, 0):
        found = ".".join(map(str, capability))
        return f"they need a GPU of compute capability 8.0 or later, and this one has {found}"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    return None
