"""Results that a recompute rule keeps as one, although many operations compute them.

Attention by a ring is a loop of operations and messages. A rule that saves attention keeps the
loop's last result; the recomputation then runs nothing of the loop, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ..config.options.recompute import Results

Whole = Callable[[], tuple[Tensor, ...]]


class SeesWholeResults(TorchDispatchMode):
    """A mode that sees which operations compute one result together."""

    def whole(self, kind: Results, compute: Whole) -> tuple[Tensor, ...]:
        """Return the result of `compute`, or one that stands for it."""
        raise NotImplementedError


def as_one(kind: Results, compute: Whole) -> tuple[Tensor, ...]:
    """Return the result of `compute`, whose operations count as one of this kind."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, SeesWholeResults):
            compute = partial(mode.whole, kind, compute)
    return compute()
