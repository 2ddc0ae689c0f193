"""Rows in FP8 (e4m3), with a scale for each row, in one pass over memory; the twin is in
models/layers/fp8.py.

Kernels whose programs hold whole rows store them so by the same function (programs/fp8.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import layout
from .launch import Programs
from .op import op

E4M3 = torch.float8_e4m3fn
MAX_WIDTH = 1 << 16
"""Kernel limit: numbers per row, which must fit a program's registers."""


class Quantized(NamedTuple):
    """A tensor [..., width] as values · scales."""

    values: Tensor
    """e4m3 [..., width]."""
    scales: Tensor
    """fp32 [..., 1]: powers of two."""

    def dequantized(self, kind: torch.dtype) -> Tensor:
        """Return the product, which fp32, and bf16 too, represent exactly."""
        return self.values.to(kind) * self.scales.to(kind)


@cache
def _programs() -> Any:
    from .programs import fp8

    return Programs(fp8)


def unsupported_reason(width: int) -> str | None:
    """Return why the kernel cannot take rows of this width, or None."""
    return f"a row has {width} numbers, and its limit is {MAX_WIDTH}" if width > MAX_WIDTH else None


@op("fp8_rows")
def fp8_rows(x: Tensor, gains: Tensor | None, highest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x · gains in FP8: values [..., width] and scales [..., 1]. x [..., width], gains
    [width]. `highest` [..., 1] is each row's max |x · gains|, where ranks share rows."""
    rows = x.contiguous().view(-1, x.shape[-1])
    values, scales = empty_quantized(x)
    block, rows_per_program, warps = layout.row_tile_sizes(rows.shape[1])
    _programs().fp8_quantize_rows[(-(-len(rows) // rows_per_program),)](
        rows, rows if gains is None else gains.contiguous(),
        rows if highest is None else highest.contiguous(), values, scales, *rows.shape,
        GAINS=gains is not None, HIGHEST=highest is not None, ROWS=rows_per_program, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return values, scales


@fp8_rows.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_quantized(x)


def empty_quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate values [..., width] and scales [..., 1] for x [..., width]."""
    values = torch.empty(x.shape, dtype=E4M3, device=x.device)
    return values, torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
