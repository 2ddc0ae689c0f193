"""Options that several Hyena operators share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .base import FusedOptions, check_divides


@dataclass(frozen=True, kw_only=True)
class HyenaOptions(FusedOptions):
    """Options that all Hyena operators have."""

    featurizer: int = 3
    """Taps in the short filter on q, k and v."""
    featurizer_bias: bool = False
    """Add a bias in the featurizer."""
    qkv_bias: bool = False
    """Add a bias in the projection to q, k and v."""
    output_bias: bool = True
    """Add a bias in the output projection."""

    def problems(self, width: int) -> Iterator[str]:
        if self.featurizer < 1:
            yield f"featurizer must be at least 1, not {self.featurizer}"

    def tp_sizes(self, width: int) -> dict[str, int]:
        return {"channels": width}


@dataclass(frozen=True, kw_only=True)
class LongHyenaOptions(HyenaOptions):
    """Options for Hyena operators with medium and long filters."""

    groups: int | None = None
    """Filters; each is shared by width/groups neighbouring channels. None: one for each channel."""
    slow_heads: bool = False
    """Each group is a head: the filter convolves the outer products k ⊗ v."""

    def problems(self, width: int) -> Iterator[str]:
        yield from super().problems(width)
        yield from check_divides("groups", self.filters(width), "the width", width)

    def filters(self, width: int) -> int:
        """Count the filters at this model width."""
        return width if self.groups is None else self.groups

    def tp_sizes(self, width: int) -> dict[str, int]:
        heads = {"heads": self.filters(width)} if self.slow_heads else {}
        return {**super().tp_sizes(width), **heads}


@dataclass(frozen=True, kw_only=True)
class ModalOptions(LongHyenaOptions):
    """Options for modal filters."""

    state_size: int = 16
    """N: exponentials for each filter."""
    method: Literal["scan", "fft"] = "scan"
    """Convolution algorithm; the result is the same."""
    chunk: int = 32
    """Tokens per scan block; affects the speed, not the result."""

    def steps(self, device: str) -> bool:
        return device != "cuda" and self.method == "scan"

    def problems(self, width: int) -> Iterator[str]:
        yield from super().problems(width)
        for name in ("state_size", "chunk"):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, not {getattr(self, name)}"
