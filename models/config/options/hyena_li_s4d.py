"""Options for Hyena-LI in S4D form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .hyena import ModalOptions


@dataclass(frozen=True, kw_only=True)
class HyenaLIS4DOptions(ModalOptions):
    """Hyena, long implicit filter with complex poles, in S4D form."""

    kind: Literal["hyena-li-s4d"] = "hyena-li-s4d"

    def steps(self, device: str) -> bool:
        return super().steps(device) or self.method == "scan"
