"""Hyena-SE options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .base import check_divides
from .hyena import HyenaOptions


@dataclass(frozen=True, kw_only=True)
class HyenaSEOptions(HyenaOptions):
    """Hyena, short explicit filter."""

    kind: Literal["hyena-se"] = "hyena-se"
    groups: int
    """Filters; each is shared by width/groups neighbouring channels."""
    taps: int = 7
    """K, the filter's length in tokens."""
    pregate: bool = True
    """Multiply v by k before the filter; without it, k is computed and not used."""
    postgate: bool = True
    """Multiply by q after the filter; without it, q is computed and not used."""

    def problems(self, width: int) -> Iterator[str]:
        yield from super().problems(width)
        yield from check_divides("groups", self.groups, "the width", width)
        if not 1 <= self.taps <= 16:
            yield f"a short filter has 1 to 16 taps, not {self.taps}; hyena-mr has longer ones"
