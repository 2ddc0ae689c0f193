"""Base of the modal Hyena-LI operators: a filter as long as the document, a sum of N exponentials.

    h_t = Re Σ_n R_n · exp(−λ_n · t)                       for each channel

The operator is a diagonal state space: a chunked scan computes the convolution exactly, in linear
time, with N state elements for each channel; each document starts from a state of zeros. The FFT
form gives the same result. Subclasses define λ and R (`modes`) by parameters of their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..layers.convolution import convolution_flops
from ..layers.gated_convolution import gated_convolution, gated_modal
from ..layers.scan import real
from ..parallel.channels import ALL
from .base import BatchContext
from .hyena import Hyena, HyenaOptions


@dataclass(frozen=True, kw_only=True)
class ModalOptions(HyenaOptions):
    """Options of all modal filters."""

    state_size: int = 16
    """N: exponentials for each channel."""
    method: Literal["scan", "fft"] = "scan"
    """Form of the convolution; the result is the same."""
    chunk: int = 32
    """Tokens for each block of the scan; affects the speed, not the result."""

    def problems(self, width: int) -> Iterator[str]:
        yield from super().problems(width)
        for name in ("state_size", "chunk"):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, not {getattr(self, name)}"


class ModalHyena(Hyena):
    """Subclasses set `oscillates` (True if the rates are complex) and implement `modes`."""

    oscillates: bool

    def __init__(self, options: ModalOptions, width: int) -> None:
        super().__init__(options, width, skip=True)

    @abstractmethod
    def modes(self, channels: slice = ALL) -> tuple[Tensor, Tensor]:
        """Return the rates λ and the residues R [width, N], real or complex."""

    def filter(self, length: int, channels: slice = ALL) -> Tensor:
        """h [width, length]."""
        rates, residues = self.modes(channels)
        time = torch.arange(length, device=rates.device)
        powers = torch.exp(-rates.unsqueeze(-1) * time)
        return real(torch.einsum("dn,dnt->dt", residues, powers))

    def mix(self, z: Tensor, batch: BatchContext) -> Tensor:
        axis = batch.axes.context
        by_states = axis.size > 1 and batch.axes.hyena_li == "states"
        if by_states or (axis.size == 1 and self.scans(batch)):
            return self.scan(z, batch, skip=self.skip, gated=True)
        return self.mix_by_channels(z, self.whole_rows, batch)

    def scans(self, batch: BatchContext) -> bool:
        """True if whole rows are scanned; generation always scans."""
        return self.options.method == "scan" or batch.state is not None

    def whole_rows(self, w: Tensor, channels: slice, batch: BatchContext) -> Tensor:
        """Filter some of the channels of whole rows."""
        if self.scans(batch):
            return self.scan(w, batch, channels)
        taps = self.filter(w.shape[1], channels)
        kernel = self.options.kernel
        return gated_convolution(w, taps, batch.documents, method="fft", kernel=kernel)

    def scan(
        self,
        x: Tensor,
        batch: BatchContext,
        channels: slice = ALL,
        *,
        skip: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """Scan whole rows, or this rank's part of them."""
        tensors = batch.state.tensors if batch.state is not None else None
        y, state = gated_modal(
            x,
            *self.modes(channels),
            skip,
            batch.documents,
            state=tensors.get("modes") if tensors is not None else None,
            axis=batch.axes.context,
            final_state=tensors is not None,
            gated=gated,
            chunk=self.options.chunk,
            kernel=self.options.kernel if tensors is None else "torch",
        )
        if tensors is not None and state is not None:
            tensors["modes"] = state
        return y

    def packing_chunks(self, length: int) -> set[int]:
        return {min(self.options.chunk, length)} if self.options.method == "scan" else set()

    def flops(self, length: int) -> dict[str, float]:
        """The scan's matrix products: within the chunk, into the state, and out of it."""
        flops = super().flops(length)
        if self.options.method == "fft":
            flops["fft"] = self.width * convolution_flops(length, length, "fft")
        else:
            chunk = min(self.options.chunk, length)
            flops["scan"] = self.width * (2.0 * chunk + 2 * self.product * self.options.state_size)
        return flops

    def step_flops(self, seen: int) -> dict[str, float]:
        """For each state element a product and a sum in, and out."""
        elements = self.width * self.options.state_size
        return {**super().flops(1), "scan": 2 * self.product * elements}

    @property
    def product(self) -> float:
        """Operations of a product and a sum."""
        return 8.0 if self.oscillates else 2.0
