"""Training precisions, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NumberFormat = Literal["float32", "bfloat16"]
"""Name of a torch.dtype."""
NUMBER_BYTES: dict[NumberFormat, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Matrices whose products run in FP8, under `precision: fp8`."""

    matrices: Literal["all", "hyena", "evo2"] = "all"
    """all: input and output projections of all operators. hyena: only Hyena operators' (not Hyena
    MLPs'). evo2: only Hyena operators' input projections, as in Evo 2's training."""
    smallest: int = 2048
    """Matrices with fewer rows or columns stay in bf16."""
    ends: int = 1
    """Blocks at the beginning, and at the end, whose matrices stay in bf16."""

    def __post_init__(self) -> None:
        if self.smallest < 16:
            raise ValueError(f"smallest must be at least 16, not {self.smallest}")
        if self.ends < 0:
            raise ValueError(f"ends must be at least 0, not {self.ends}")


@dataclass(frozen=True)
class Precision:
    """A run's number formats. Code asks for these properties, never for the name."""

    name: str
    compute: NumberFormat
    """Weights and activations in the forward and backward passes."""
    separate_masters: bool
    """True if fp32 master weights exist beside the weights that compute. Gradients are summed, and
    optimizer states are kept, in fp32 in either case."""
    fp8: Fp8Config | None = None
    """Matrices whose forward products and input gradients run in e4m3; None: none."""

    def __str__(self) -> str:
        return self.name

    @property
    def weight_bytes(self) -> int:
        """Bytes per weight in the compute dtype."""
        return NUMBER_BYTES[self.compute]


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", "float32", separate_masters=False),
        Precision("bf16", "bfloat16", separate_masters=True),
        Precision("fp8", "bfloat16", separate_masters=True, fp8=Fp8Config()),
    )
}


def default_precision(device: str) -> Precision:
    """Return the default precision on this kind of device."""
    return PRECISIONS["bf16" if device == "cuda" else "fp32"]
