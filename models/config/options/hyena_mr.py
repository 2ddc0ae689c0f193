"""Hyena-MR options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from .base import check_divides
from .hyena import LongHyenaOptions
from .names import Method


@dataclass(frozen=True, kw_only=True)
class HyenaMROptions(LongHyenaOptions):
    """Hyena, medium filter, regularised by a decay."""

    kind: Literal["hyena-mr"] = "hyena-mr"
    groups: int = field()  # required: without it, the field has the default of the base
    """Filters; each is shared by width/groups neighbouring channels."""
    taps: int = 128
    """K, the filter's length in tokens."""
    decay: Literal["weak", "normal", "strong", "none"] = "weak"
    """`none` if the filter already includes its decay, as in converted models."""
    decay_repeats: int = 1
    """Repetitions of the decay range over the groups."""
    filter_horizon: int = 8192
    """S, in tokens: the span over which the decay is defined."""
    method: Method = "auto"
    """Convolution algorithm; the result is the same."""

    def problems(self, width: int) -> Iterator[str]:
        yield from super().problems(width)
        yield from check_divides("decay_repeats", self.decay_repeats, "groups", self.groups)
        if not 1 <= self.taps <= self.filter_horizon:
            yield (
                f"taps ({self.taps}) must lie between 1 and the filter_horizon"
                f" ({self.filter_horizon})"
            )
