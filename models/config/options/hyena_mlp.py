"""Short-Hyena MLP options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .base import FusedOptions, check_divides


@dataclass(frozen=True, kw_only=True)
class HyenaMLPOptions(FusedOptions):
    """An MLP that looks a few tokens back."""

    kind: Literal["hyena-mlp"] = "hyena-mlp"
    hidden: int
    """Convolution channels."""
    groups: int
    """Filters; each is shared by hidden/groups neighbouring channels."""
    taps: int = 7
    """K, the filters' length in tokens."""
    featurizer: int = 0
    """Taps in a short filter on q, k and v, as Savanna's MLP has; 0: none."""
    pregate: bool = True
    """Multiply v by k before the filter; without it, k is computed and not used."""
    postgate: bool = True
    """Multiply by q after the filter; without it, q is computed and not used."""
    bias: bool = False
    """Add biases in the projections."""
    output_bias: bool = False
    """Add a bias in the output projection alone."""

    def problems(self, width: int) -> Iterator[str]:
        yield from check_divides("groups", self.groups, "hidden", self.hidden)
        if not 1 <= self.taps <= 16:
            yield f"a short filter has 1 to 16 taps, not {self.taps}"
        if not 0 <= self.featurizer <= 16:
            yield f"featurizer has 1 to 16 taps, or 0 for none, not {self.featurizer}"

    def tp_sizes(self, width: int) -> dict[str, int]:
        return {"hidden channels": self.hidden}
