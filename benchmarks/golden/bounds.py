"""Bounds of a comparison between machines, versions or numbers of threads.

Measured with torch 2.15 on one machine, as the greatest relative difference up to a step, between
runs that differ in rounding alone:

- the same layout with other code paths (ATEN_CPU_CAPABILITY=default, MKL_CBWR=COMPATIBLE,
  ONEDNN_MAX_CPU_ISA=AVX2): loss 2e-8 at step 0, 1e-7 at step 50;
- the same model in another fp32 layout: loss 8e-8 at step 10, 3e-7 at step 100, 3e-4 at step 200;
  norm 2e-6 at step 20, 1e-5 at step 100, 1e-2 at step 200.

The bounds are ten times as wide in the first steps. There they see a learning rate 1 % higher (loss
2e-4 at step 1) and a filter of Hyena-SE that begins 1 % larger (norm 1e-5 at step 0).
"""

from __future__ import annotations

from .cases import Case
from .compare import Bounds, Limits

FP32 = Limits(loss=Bounds(1e-6, 15, 0.3), norm=Bounds(3e-6, 15, 1.0))
BF16 = Limits(loss=Bounds(2e-4, 15, 0.3), norm=Bounds(2e-3, 15, 1.0))
"""A weight that rounds to the neighbouring bf16 number is off by 2^-8. Measured as above with other
code paths: loss 1e-5 at step 0, 6e-4 at step 50; norm 1e-4 at step 0, 4e-3 at step 50."""
LIMITS = {"bf16": BF16}
"""By layout; all others have FP32."""


def limits_of(case: Case) -> Limits:
    return LIMITS.get(case.layout, FP32)
