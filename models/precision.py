"""Precisions of training, and where arithmetic must be wider than its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """Number formats of one run. Code asks for these properties, never for the name."""

    name: str
    compute: torch.dtype
    """Weights and activations in the forward and backward passes."""
    separate_masters: bool
    """True if fp32 master weights exist beside the weights that compute. Gradients are summed, and
    optimizer states are kept, in fp32 in either case."""

    def __str__(self) -> str:
        return self.name

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight that computes."""
        return self.compute.itemsize


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", torch.float32, separate_masters=False),
        Precision("bf16", torch.bfloat16, separate_masters=True),
    )
}


def default_precision(device: str) -> Precision:
    """Return the precision of a run that names none, on this kind of device."""
    return PRECISIONS["bf16" if device == "cuda" else "fp32"]


def widen(x: Tensor) -> Tensor:
    """Return half-precision tensors as float32, and float32 and float64 tensors unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
