"""Base of the Hyena operators with medium and long filters: a skip, groups and slow heads.

    y = q ⊙ (h ∗ w + d·w),  w = k ⊙ v             a filter h for each group of channels

With slow heads (Savanna's name) a group of c channels is a head. The filter convolves all products
of the head's keys and values, and the queries sum them:

    w[a, b] = k[a] · v[b],  y[b] = Σ_a q[a] · (h ∗ w + d·w)[a, b]       a, b < c; one d a head

So a head is linear attention whose weight for the token t − j is h_j. Groups of one channel give
the formula above. The products are c times as large as k ⊙ v.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..config.options.hyena import LongHyenaOptions
from ..layers.gated_convolution import gated_input
from ..parallel.channels import ALL, by_channels
from ..parallel.tensor import own_filters
from .base import BatchContext
from .hyena import Hyena


class LongHyena(Hyena):
    """Subclasses implement `filtered`."""

    skip: nn.Parameter

    def __init__(self, options: LongHyenaOptions, width: int) -> None:
        groups = options.filters(width)
        super().__init__(options, width, skip=groups if options.slow_heads else width)
        self.groups = groups
        self.head_dim = width // groups if options.slow_heads else 1

    def mix(self, z: Tensor, batch: BatchContext) -> Tensor:
        if not self.options.slow_heads:
            return self.filtered(z, batch, self.skip, gated=True)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in z.chunk(3, dim=-1))
        products = k.unsqueeze(-1) * v.unsqueeze(-2)  # [rows, length, heads, c, c]
        w = products.flatten(2)
        y = self.filtered(w, batch, for_channels(self.skip, w.shape[-1]), gated=False)
        return torch.einsum("blhc,blhcd->blhd", q, y.view_as(products)).flatten(2)

    @abstractmethod
    def filtered(self, x: Tensor, batch: BatchContext, skip: Tensor, *, gated: bool) -> Tensor:
        """Return h ∗ w + d·w. If `gated`, x holds q, k and v, concatenated, and the result is
        multiplied by q; otherwise x is w."""

    def own_filters(self, filters: Tensor, batch: BatchContext) -> Tensor:
        """Return the filters of this rank's channels, out of the rows that it holds."""
        return own_filters(filters, self.groups, self.width, batch.axes.tensor)

    def taps_of(
        self,
        compute: Callable[[slice], Tensor],
        channels: int,
        part: slice,
        batch: BatchContext,
    ) -> Tensor:
        """Return filters, computed from some of the rows that this rank holds, for a part of this
        number of channels."""
        if self.groups == channels * batch.axes.tensor.size:
            return compute(part)
        taps = self.own_filters(compute(ALL), batch)
        return taps if part == ALL else for_channels(taps, channels, part)

    def filtered_by_channels(
        self,
        x: Tensor,
        whole_rows: Callable[[Tensor, slice, int, BatchContext], Tensor],
        batch: BatchContext,
        skip: Tensor,
        *,
        gated: bool,
    ) -> Tensor:
        """`filtered` under context parallelism: `whole_rows(w, part, channels, batch)` filters a
        part of the channels of whole rows."""
        w = gated_input(x) if gated else x
        length, channels = w.shape[1:]
        whole = batch.whole(length)
        y = by_channels(
            w, lambda rows, part: whole_rows(rows, part, channels, whole), batch.axes.context
        )
        y = y + skip * w
        return x[..., :channels] * y if gated else y

    def filtered_channels(self) -> int:
        """Number of channels that are convolved."""
        return self.width * self.head_dim

    def flops(self, length: int) -> dict[str, float]:
        heads = {"heads": 2.0 * self.filtered_channels()} if self.options.slow_heads else {}
        return {**super().flops(length), **heads}


def for_channels(rows: Tensor, channels: int, part: slice = ALL) -> Tensor:
    """rows [filters, …], each shared by equally many neighbouring channels → those of a part of
    the channels."""
    if channels > len(rows):
        rows = rows.repeat_interleave(channels // len(rows), dim=0)
    return rows[part]
