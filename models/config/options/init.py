"""Initial weight distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Initial distribution of matrices. Operators initialise dt, A and filters themselves."""

    weights: Literal["normal", "small", "uniform"] = "normal"
    """`normal`: N(0, std²); `small`: N(0, 2 / 5·width); `uniform`: U(±1/√inputs), as in torch."""
    std: float = 0.02
    """Standard deviation under `normal`, and for embeddings under `uniform`."""
    output: Literal["same", "depth", "wang"] = "same"
    """Matrices that write to the residual stream: like the others (`same`); divided by √(residual
    branches) (`depth`); or with standard deviation 2 / (layers · √width) (`wang`)."""

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise ValueError(f"std must be above 0, not {self.std}")
