"""Composite results: many operations compute them, and a recompute rule saves them as a unit.

Ring attention loops over operations and messages. A rule that saves attention saves the loop's
final result, so the recomputation runs no hop and sends no message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ..config.options.recompute import Results

Compute = Callable[[], tuple[Tensor, ...]]


class CompositeResultMode(TorchDispatchMode):
    """Dispatch mode that intercepts composite results."""

    def run_composite(self, kind: Results, compute: Compute) -> tuple[Tensor, ...]:
        """Return `compute()`, or a saved result."""
        raise NotImplementedError


def run_composite(kind: Results, compute: Compute) -> tuple[Tensor, ...]:
    """Run `compute`, whose operations count as a single operation with this kind."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, CompositeResultMode):
            compute = partial(mode.run_composite, kind, compute)
    return compute()
