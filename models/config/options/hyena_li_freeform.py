"""Free-form Hyena-LI options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .hyena import LongHyenaOptions


@dataclass(frozen=True, kw_only=True)
class HyenaLIFreeformOptions(LongHyenaOptions):
    """Hyena, long implicit filter in free form."""

    kind: Literal["hyena-li-freeform"] = "hyena-li-freeform"
    filter_width: int = 16
    """Width of the network that computes the filter."""
    filter_horizon: int = 8192
    """S: the filter's length. Inputs further back are not seen."""
    features: int = 33
    """Input features: t, and a cosine and a sine for each of (features − 1)/2 frequencies."""
    inner_layers: int = 2
    """Layers in the network between the first and the last."""
    frequency: float = 1.0
    """Initial ω."""
    fast_decay: float = 0.3
    """Fraction of the horizon after which the fastest decay is 0.01."""
    slow_decay: float = 1.2
    """Fraction of the horizon after which the slowest decay is 0.01."""
    learned_decay: bool = False
    """Learn each filter's decay."""
    last_start: Literal["uniform", "xavier"] = "uniform"
    """Initial last layer: U(±1/√inputs), or N(0, 2/(inputs + outputs)), as Savanna has."""

    def problems(self, width: int) -> Iterator[str]:
        yield from super().problems(width)
        if self.filter_horizon < 2 or self.filter_width < 1:
            yield (
                f"filter_horizon ({self.filter_horizon}) must be at least 2 and"
                f" filter_width ({self.filter_width}) at least 1"
            )
        if self.features < 3 or self.features % 2 == 0:
            yield f"features must be odd and at least 3, not {self.features}"
        if self.inner_layers < 0:
            yield f"inner_layers must be at least 0, not {self.inner_layers}"
        for name in ("fast_decay", "slow_decay"):
            if not getattr(self, name) > 0:
                yield f"{name} must be above 0, not {getattr(self, name)}"
