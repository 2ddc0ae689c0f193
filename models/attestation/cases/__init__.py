"""Cases of every fused kernel and option: inputs, the call, and the twin.

Tests run them in Triton's interpreter and compile them. On a GPU, benchmarks/long/kernels.py and
`headrace doctor --kernels` run them, and the start of a run those of its model's calls.
"""

from __future__ import annotations

from .case import Case
from .convolutions import modals, short_convolutions, toeplitzes, transforms
from .scans import selective_scans, ssds
from .tokens import gated_norms, glus, losses, norms, ropes, routed


def all_cases() -> list[Case]:
    return [
        *losses(),
        *short_convolutions(),
        *toeplitzes(),
        *transforms(),
        *modals(),
        *ssds(),
        *selective_scans(),
        *norms(),
        *gated_norms(),
        *ropes(),
        *routed(),
        *glus(),
    ]
