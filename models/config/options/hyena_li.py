"""Modal Hyena-LI options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .hyena import ModalOptions


@dataclass(frozen=True, kw_only=True)
class HyenaLIOptions(ModalOptions):
    """Hyena, long implicit filter in modal form."""

    kind: Literal["hyena-li"] = "hyena-li"
    poles: Literal["real", "complex"] = "real"
    """Complex poles oscillate as they decay."""
    rates: Literal["log", "plain", "product"] = "log"
    """Learned parameter: r, the logarithm of a pole's rate; (converted models) the rate e^r; or
    (Savanna) two parameters p and γ with the rate e^p · e^γ."""
    gamma_min: float = 0.01
    """Rates start between gamma_min/e and gamma_max/e."""
    gamma_max: float = 0.1
    """Upper bound on γ's start."""

    def steps(self, device: str) -> bool:
        return super().steps(device) or (self.method == "scan" and self.poles == "complex")

    def problems(self, width: int) -> Iterator[str]:
        yield from super().problems(width)
        if not 0 < self.gamma_min <= self.gamma_max:
            yield (
                f"gamma_min ({self.gamma_min:g}) must be above 0 and at most gamma_max"
                f" ({self.gamma_max:g})"
            )
