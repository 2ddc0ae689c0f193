"""Names of the state tensors that optimizers keep of a parameter, and of their arithmetic."""

from __future__ import annotations

from typing import Literal

ADAM = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum"
MUON = (MOMENTUM,)
Arithmetic = Literal["fp32", "bf16"]
