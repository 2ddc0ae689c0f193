"""Cases for every fused kernel and option: inputs, the kernel, and its twin.

Tests run them in Triton's interpreter and compile them. On a GPU, benchmarks/long/kernels.py and
`headrace doctor --kernels` run them; a run's start runs those for its model's calls.
"""

from __future__ import annotations

from .case import Case
from .convolutions import fft_cases, modal_cases, short_convolution_cases, toeplitz_cases
from .scans import delta_cases, selective_scan_cases, ssd_cases
from .tokens import (
    gated_norm_cases,
    glu_cases,
    loss_cases,
    norm_cases,
    rope_cases,
    routed_rows_cases,
)


def all_cases() -> list[Case]:
    return [
        *loss_cases(),
        *short_convolution_cases(),
        *toeplitz_cases(),
        *fft_cases(),
        *modal_cases(),
        *ssd_cases(),
        *selective_scan_cases(),
        *delta_cases(),
        *norm_cases(),
        *gated_norm_cases(),
        *rope_cases(),
        *routed_rows_cases(),
        *glu_cases(),
    ]
