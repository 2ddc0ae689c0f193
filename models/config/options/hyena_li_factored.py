"""Options of factored Hyena-LI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .hyena import ModalOptions


@dataclass(frozen=True, kw_only=True)
class HyenaLIFactoredOptions(ModalOptions):
    """Hyena, long implicit filter with real poles, as products of factors."""

    kind: Literal["hyena-li-factored"] = "hyena-li-factored"
    pole_factors: int = 3
    """Factors p of a pole."""
    residue_factors: int = 3
    """Factors R of a residue."""
    filter_horizon: int = 8192
    """S: the number of tokens over which time is defined."""

    def problems(self, width: int) -> Iterator[str]:
        yield from super().problems(width)
        for name in ("pole_factors", "residue_factors"):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, not {getattr(self, name)}"
        if self.filter_horizon < 2:
            yield f"filter_horizon must be at least 2, not {self.filter_horizon}"
