"""Long convolutions sharded by channel: each rank has full rows for some channels.

Each of two all-to-alls sends (N−1)/N of a rank's tensor. The gates before and after the convolution
run where the tokens are. A rank computes filters for its local channels only, so filter gradients
must be summed over the axis.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .axes import Axis
from .exchange import gather_rows, scatter_rows

ALL = slice(None)


def apply_by_channel(x: Tensor, function: Callable[[Tensor, slice], Tensor], axis: Axis) -> Tensor:
    """Apply `function(x, channels)` to full rows; x [rows, local_length, width] → y
    [rows, local_length, width]."""
    if axis.size == 1:
        return function(x, ALL)
    channel_slices = [rank.part(x.shape[2]) for rank in axis.ranks()]
    channels = [channel_slice.stop - channel_slice.start for channel_slice in channel_slices]
    y = function(gather_rows(x, channels, axis), channel_slices[axis.rank])
    return scatter_rows(y, channels, axis)
