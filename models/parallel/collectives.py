"""Collectives as torch's functional ops, which return a new tensor and name the process group.

torch.compile keeps functional ops in its graph, where it can overlap them with compute. None is
differentiable: callers define gradients. Complex tensors travel as real pairs.
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
"""The ops; torch's module `_functional_collectives` registers their shapes."""
around_wait: Callable[[], AbstractContextManager[None]] = nullcontext
"""Context around each wait for other ranks: a trainer may time it. Compiled code has none."""


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """x […] → [ranks, …], every rank's x."""
    sent = view_real(x).contiguous().unsqueeze(0)
    gathered = _ops.all_gather_into_tensor(sent, axis.size, axis.name)
    return restore_complex(wait(gathered), x)


def reduce_scatter(chunks: Tensor, axis: Axis) -> Tensor:
    """chunks [ranks, …] → […]: this rank's part, summed over all ranks."""
    sent = view_real(chunks).contiguous().flatten(0, 1)
    reduced = _ops.reduce_scatter_tensor(sent, "sum", axis.size, axis.name)
    return restore_complex(wait(reduced), chunks)


def all_reduce(x: Tensor, axis: Axis, operation: Literal["sum", "max"] = "sum") -> Tensor:
    """Return the elementwise sum or maximum over all ranks."""
    total = _ops.all_reduce(view_real(x).contiguous(), operation, axis.name)
    return restore_complex(wait(total), x)


def all_to_all(
    flat: Tensor, recv_counts: Sequence[int], send_counts: Sequence[int], axis: Axis
) -> Tensor:
    """Send `send_counts[r]` elements from `flat` to rank r, and return `recv_counts[r]` elements
    from rank r, in rank order."""
    received = start_all_to_all(view_real(flat).contiguous(), recv_counts, send_counts, axis)
    return restore_complex(wait(received), flat)


def start_all_to_all(
    flat: Tensor, recv_counts: Sequence[int], send_counts: Sequence[int], axis: Axis
) -> Tensor:
    """Start an all-to-all: the result is valid after `wait`. `flat` must be contiguous, and live
    until then."""
    received: Tensor = _ops.all_to_all_single(flat, list(recv_counts), list(send_counts), axis.name)
    return received


def wait(received: Tensor) -> Tensor:
    """Block until a result is valid."""
    context = nullcontext if torch.compiler.is_compiling() else around_wait
    with context():
        ready: Tensor = _ops.wait_tensor(received)
    return ready


def view_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def restore_complex(x: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(x) if like.is_complex() else x
