"""Rotary position embedding and its scaling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ....console.config import added_field


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding and its scaling."""

    base: float = 10_000.0
    """Also called theta."""
    channels: int | None = None
    """Channels per head that turn, from the first; all if unset."""
    scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"
    """`linear`: positions divided by `factor`; `ntk`: a larger base; `yarn`: slow frequencies
    divided by `factor`, fast ones kept, a ramp between; `llama3`: the same by wavelength."""
    factor: float = 1.0
    """New context length divided by `original_length`."""
    original_length: int = 8192
    """Context length in the first training; used by `yarn` and `llama3`. An exported folder names
    it, times `factor`, as its longest context; without scaling, the run's longest row."""
    beta_fast: float = 32.0
    """`yarn`: turns within `original_length` above which a frequency is kept."""
    beta_slow: float = 1.0
    """`yarn`: turns within `original_length` below which a frequency is divided."""
    truncate: bool = added_field(True)
    """`yarn`: round the ends of the ramp outwards to whole pairs; false in gpt-oss."""
    attention_factor: float | None = added_field(None)
    """`yarn`: multiplies rotated queries and keys; 0.1·ln(factor) + 1 if unset."""
    proportion: float = added_field(1.0)
    """Fraction of the pairs that turn, those of the highest frequencies; the others stay (LFM3:
    0.5). Unlike `channels`, it moves no frequency."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above `original_length` / low_freq_factor are stretched in full."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths below `original_length` / high_freq_factor are kept."""

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, not {self.factor}")
        if self.scaling == "none" and self.factor != 1:
            raise ValueError(f"factor {self.factor} needs a `scaling`: linear, ntk, yarn or llama3")
        if not self.base > 1:
            raise ValueError(f"base must be above 1, not {self.base}")
        if self.original_length < 1:
            raise ValueError(f"original_length must be at least 1, not {self.original_length}")
        if not 0 < self.proportion <= 1:
            raise ValueError(f"proportion must be above 0 and at most 1, not {self.proportion}")
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise ValueError(f"attention_factor must be above 0, not {self.attention_factor}")
        if self.scaling != "yarn" and (self.attention_factor is not None or not self.truncate):
            raise ValueError("attention_factor and truncate belong to `scaling: yarn`")
        for high, low in (("beta_fast", "beta_slow"), ("high_freq_factor", "low_freq_factor")):
            if not getattr(self, high) > getattr(self, low) > 0:
                ends = f"{high} ({getattr(self, high)}) and {low} ({getattr(self, low)})"
                raise ValueError(f"{ends} must be above 0, and the first the larger")

    def problems(self, head_dim: int) -> Iterator[str]:
        """Yield why a head with so many channels cannot turn so."""
        turning = head_dim if self.channels is None else self.channels
        if turning % 2 or not 2 <= turning <= head_dim:
            yield f"rope turns an even number of channels, up to {head_dim}: {turning}"
        elif self.scaling == "ntk" and turning == 2:
            yield "`scaling: ntk` needs at least 4 channels that turn, not 2"
