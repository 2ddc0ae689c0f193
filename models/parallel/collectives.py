"""Collectives as torch's functional ops: each returns a new tensor and names its process group.

torch.compile keeps such an op in its graph, where it can be moved past other work. None of them is
differentiable: their callers define the gradients. Complex numbers travel as pairs of real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed._functional_collectives
from torch import Tensor

from .axes import Axis

_ops: Any = torch.ops._c10d_functional
"""The ops; torch's module `_functional_collectives` gives them their shapes."""
around_wait: Callable[[], AbstractContextManager[None]] = nullcontext
"""Context of each wait for the other ranks: a trainer may time it. Compiled code has none."""


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """x […] → [ranks, …]: the tensors of all ranks."""
    sent = as_real(x).contiguous().unsqueeze(0)
    every = _ops.all_gather_into_tensor(sent, axis.size, axis.name)
    return as_before(wait(every), x)


def reduce_scatter(parts: Tensor, axis: Axis) -> Tensor:
    """parts [ranks, …] → […]: the sum over all ranks of the parts for this rank."""
    sent = as_real(parts).contiguous().flatten(0, 1)
    own = _ops.reduce_scatter_tensor(sent, "sum", axis.size, axis.name)
    return as_before(wait(own), parts)


def all_reduce(x: Tensor, axis: Axis, how: Literal["sum", "max"] = "sum") -> Tensor:
    """Return the sum or the maximum over all ranks."""
    total = _ops.all_reduce(as_real(x).contiguous(), how, axis.name)
    return as_before(wait(total), x)


def all_to_all(flat: Tensor, due: Sequence[int], sent: Sequence[int], axis: Axis) -> Tensor:
    """Send `sent[r]` elements of `flat` to rank r; return the `due[r]` elements from each rank."""
    received = start_all_to_all(as_real(flat).contiguous(), due, sent, axis)
    return as_before(wait(received), flat)


def start_all_to_all(flat: Tensor, due: Sequence[int], sent: Sequence[int], axis: Axis) -> Tensor:
    """Start to send and to receive: the result is valid after `wait`, and `flat`, which is
    contiguous, must live until then."""
    received: Tensor = _ops.all_to_all_single(flat, list(due), list(sent), axis.name)
    return received


def wait(received: Tensor) -> Tensor:
    """Wait until a result is valid."""
    around = nullcontext if torch.compiler.is_compiling() else around_wait
    with around():
        arrived: Tensor = _ops.wait_tensor(received)
    return arrived


def as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def as_before(x: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(x) if like.is_complex() else x
