"""Long convolutions by channels: each rank has whole rows of some of the channels.

There and back, each rank sends (N−1)/N of its part of one tensor; the gates before and after the
convolution are computed where the tokens are. Each rank computes the filters of its own channels
only, so their gradients must be summed over the axis.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .axes import Axis
from .exchange import own_parts, whole_rows

ALL = slice(None)


def by_channels(x: Tensor, function: Callable[[Tensor, slice], Tensor], axis: Axis) -> Tensor:
    """Apply `function(x, channels)` to whole rows of x [rows, part, width]."""
    if axis.size == 1:
        return function(x, ALL)
    parts = [rank.part(x.shape[2]) for rank in axis.ranks()]
    channels = [part.stop - part.start for part in parts]
    y = function(whole_rows(x, channels, axis), parts[axis.rank])
    return own_parts(y, channels, axis)
