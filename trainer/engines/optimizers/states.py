"""Name the optimizers' state tensors, and Muon's number formats."""

from __future__ import annotations

from typing import Literal

ADAM = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum"
MUON = (MOMENTUM,)
Arithmetic = Literal["fp32", "bf16"]
