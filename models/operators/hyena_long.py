"""Base class for Hyena operators with medium and long filters: a skip, groups and slow heads.

    y = q ⊙ (h ∗ w + d·w),  w = k ⊙ v             a filter h for each group of channels

With slow heads (Savanna's name) a group with c channels is a head. The filter convolves all
products k[a] · v[b] in the head, and the queries sum them:

    w[a, b] = k[a] · v[b],  y[b] = Σ_a q[a] · (h ∗ w + d·w)[a, b]       a, b < c; one d a head

So a head is linear attention whose weight for the token t − j is h_j. Single-channel groups give
the formula above. The products are c times as large as k ⊙ v.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..config.options.hyena import LongHyenaOptions
from ..layers.gated_convolution import gated_input
from ..parallel.channels import ALL, apply_by_channel
from ..parallel.tensor import select_local_filters
from .base import BatchContext
from .hyena import Hyena


class LongHyena(Hyena):
    """Subclasses implement `filtered`."""

    skip: nn.Parameter

    def __init__(self, options: LongHyenaOptions, width: int) -> None:
        groups = options.filters(width)
        super().__init__(options, width, skip_width=groups if options.slow_heads else width)
        self.groups = groups
        self.head_dim = width // groups if options.slow_heads else 1

    def mix(self, z: Tensor, batch: BatchContext) -> Tensor:
        if not self.options.slow_heads:
            return self.filtered(z, batch, self.skip, gated=True)
        q, k, v = (tensor.unflatten(-1, (-1, self.head_dim)) for tensor in z.chunk(3, dim=-1))
        products = k.unsqueeze(-1) * v.unsqueeze(-2)  # [rows, length, heads, c, c]
        w = products.flatten(2)
        y = self.filtered(w, batch, expand_to_channels(self.skip, w.shape[-1]), gated=False)
        return torch.einsum("blhc,blhcd->blhd", q, y.view_as(products)).flatten(2)

    @abstractmethod
    def filtered(self, x: Tensor, batch: BatchContext, skip: Tensor, *, gated: bool) -> Tensor:
        """Return h ∗ w + d·w [b, t, channels]. If `gated`, x [b, t, 3·channels] holds q, k and v,
        and the result is multiplied by q; otherwise x is w [b, t, channels]. skip d [channels]."""

    def local_filters(self, filters: Tensor, batch: BatchContext) -> Tensor:
        """Select the filters for this rank's channels from its stored ones, [filters, …]."""
        return select_local_filters(filters, self.groups, self.width, batch.axes.tensor)

    def taps_for_channels(
        self,
        compute_taps: Callable[[slice], Tensor],
        num_channels: int,
        channel_range: slice,
        batch: BatchContext,
    ) -> Tensor:
        """Return filters [channels or groups, length] for a range of this rank's num_channels
        channels; `compute_taps` computes a range of the stored filters."""
        if self.groups == num_channels * batch.axes.tensor.size:
            return compute_taps(channel_range)
        taps = self.local_filters(compute_taps(ALL), batch)
        return (
            taps if channel_range == ALL else expand_to_channels(taps, num_channels, channel_range)
        )

    def filtered_by_channels(
        self,
        x: Tensor,
        filter_rows: Callable[[Tensor, slice, int, BatchContext], Tensor],
        batch: BatchContext,
        skip: Tensor,
        *,
        gated: bool,
    ) -> Tensor:
        """Compute `filtered` under context parallelism: ranks exchange row slices for channel
        ranges, and `filter_rows(w, channel_range, num_channels, batch)` filters whole rows."""
        w = gated_input(x) if gated else x
        length, num_channels = w.shape[1:]
        row_batch = batch.whole_row_context(length)
        y = apply_by_channel(
            w,
            lambda rows, channel_range: filter_rows(rows, channel_range, num_channels, row_batch),
            batch.axes.context,
        )
        y = y + skip * w
        return x[..., :num_channels] * y if gated else y

    def num_filtered_channels(self) -> int:
        """Count the convolved channels."""
        return self.width * self.head_dim

    def flops(self, length: int) -> dict[str, float]:
        heads = {"heads": 2.0 * self.num_filtered_channels()} if self.options.slow_heads else {}
        return {**super().flops(length), **heads}


def expand_to_channels(filters: Tensor, num_channels: int, channel_range: slice = ALL) -> Tensor:
    """Expand filters [filters, …], each shared by equally many adjacent channels, to [channels, …]
    for a channel range."""
    if num_channels > len(filters):
        filters = filters.repeat_interleave(num_channels // len(filters), dim=0)
    return filters if channel_range == ALL else filters[channel_range]
