"""Factored Hyena-LI options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .hyena import ModalOptions


@dataclass(frozen=True, kw_only=True)
class HyenaLIFactoredOptions(ModalOptions):
    """Hyena, long implicit filter with real poles, in factored form."""

    kind: Literal["hyena-li-factored"] = "hyena-li-factored"
    pole_factors: int = 3
    """Factors p in a pole."""
    residue_factors: int = 3
    """Factors R in a residue."""
    filter_horizon: int = 8192
    """S, in tokens: the span over which time is defined."""

    def problems(self, width: int) -> Iterator[str]:
        yield from super().problems(width)
        for name in ("pole_factors", "residue_factors"):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, not {getattr(self, name)}"
        if self.filter_horizon < 2:
            yield f"filter_horizon must be at least 2, not {self.filter_horizon}"
