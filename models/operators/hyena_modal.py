"""Base class for modal Hyena-LI: a filter as long as the document, with N exponentials.

    h_t = Re Σ_n R_n · exp(−λ_n · t)                       for each group of channels

The operator is a diagonal state space: a chunked scan computes the convolution exactly, in linear
time, with N state elements per convolved channel; documents start from a zero state. The FFT form
gives the same result. Subclasses define λ and R (`modes`) by their parameters.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ..layers.convolution import convolution_flops, untraced
from ..layers.gated_convolution import gated_convolution, gated_modal
from ..layers.scan import real_part
from ..parallel.axes import Axes
from ..parallel.channels import ALL
from .base import BatchContext
from .hyena_long import LongHyena, expand_to_channels


class ModalHyena(LongHyena):
    """Subclasses set `oscillates` (True if the rates are complex) and implement `modes`."""

    oscillates: bool

    @abstractmethod
    def modes(self) -> tuple[Tensor, Tensor]:
        """Return rates λ and residues R [filters, N], real or complex, for this rank's filters."""

    def modes_for_channels(
        self, num_channels: int, channel_range: slice, batch: BatchContext
    ) -> tuple[Tensor, Tensor]:
        """Return λ and R [channels, N] for a range of this rank's num_channels channels."""
        rates, residues = (self.local_filters(filters, batch) for filters in self.modes())
        return expand_to_channels(rates, num_channels, channel_range), expand_to_channels(
            residues, num_channels, channel_range
        )

    def taps(self, length: int, filters: slice) -> Tensor:
        """Return h [filters, length]."""
        rates, residues = (modes[filters] for modes in self.modes())
        time = torch.arange(length, device=rates.device)
        powers = torch.exp(-rates.unsqueeze(-1) * time)
        return real_part(torch.einsum("dn,dnt->dt", residues, powers))

    def filtered(self, x: Tensor, batch: BatchContext, skip: Tensor, *, gated: bool) -> Tensor:
        axis = batch.axes.context
        by_states = axis.size > 1 and batch.axes.hyena_li == "states"
        if by_states or (axis.size == 1 and self.scans(batch)):
            num_channels = x.shape[-1] // (3 if gated else 1)
            modes = self.modes_for_channels(num_channels, ALL, batch)
            return self.scan(x, modes, batch, skip=skip, gated=gated)
        return self.filtered_by_channels(x, self.filter_rows, batch, skip, gated=gated)

    def scans(self, batch: BatchContext) -> bool:
        """True if whole rows are scanned; generation always scans."""
        return self.options.method == "scan" or batch.state is not None

    def filter_rows(
        self, w: Tensor, channel_range: slice, num_channels: int, batch: BatchContext
    ) -> Tensor:
        """Filter w [rows, length, channels]: full rows, and the channels in `channel_range`."""
        if self.scans(batch):
            return self.scan(w, self.modes_for_channels(num_channels, channel_range, batch), batch)
        taps = self.taps_for_channels(
            lambda filters: self.taps(w.shape[1], filters), num_channels, channel_range, batch
        )
        kernel = self.options.kernel
        return gated_convolution(w, taps, batch.documents, method="fft", kernel=kernel)

    def scan(
        self,
        x: Tensor,
        modes: tuple[Tensor, Tensor],
        batch: BatchContext,
        *,
        skip: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """Scan x [rows, length, channels], or 3·channels if `gated`: full rows, or this rank's
        slice. modes: λ and R [channels, N]; skip [channels]."""
        cache = batch.state.tensors if batch.state is not None else None
        y, state = gated_modal(
            x,
            *modes,
            skip,
            batch.documents,
            state=cache.get("modes") if cache is not None else None,
            axis=batch.axes.context,
            final_state=cache is not None,
            gated=gated,
            chunk=self.options.chunk,
            kernel=self.options.kernel if cache is None else "torch",
        )
        if cache is not None and state is not None:
            cache["modes"] = state
        return y

    def untraced(self, axes: Axes, device: torch.device) -> str | None:
        if self.fused(device):
            return None
        if self.options.method == "fft":
            return untraced(0, "fft", ranks=1)
        if axes.context.size > 1 and axes.hyena_li == "a2a":
            return "packed rows by channels in plain torch (layout.hyena_li=states can be compiled)"
        return None

    def packing_chunks(self, length: int) -> set[int]:
        return {min(self.options.chunk, length)} if self.options.method == "scan" else set()

    def flops(self, length: int) -> dict[str, float]:
        """Count the scan's FLOPs per token: products within a chunk, into the state, and from
        it."""
        flops = super().flops(length)
        if self.options.method == "fft":
            flops["fft"] = self.num_filtered_channels() * convolution_flops(length, length, "fft")
        else:
            chunk = min(self.options.chunk, length)
            scan_flops = 2.0 * chunk + 2 * self.multiply_add_flops * self.options.state_size
            flops["scan"] = self.num_filtered_channels() * scan_flops
        return flops

    def step_flops(self, seen: int) -> dict[str, float]:
        """Count FLOPs per token: for each state element a multiply-add in, and out."""
        state_numbers = self.num_filtered_channels() * self.options.state_size
        return {**super().flops(1), "scan": 2 * self.multiply_add_flops * state_numbers}

    @property
    def multiply_add_flops(self) -> float:
        """Count the FLOPs in a multiply-add, real or complex."""
        return 8.0 if self.oscillates else 2.0
