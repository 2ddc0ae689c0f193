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
from .op import op

E4M3 = torch.float8_e4m3fn
WIDEST = 1 << 16
"""Numbers of the widest row: it must fit a program's registers."""


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

    return fp8


def unsupported_reason(width: int) -> str | None:
    """Return why the kernel cannot take rows of this width, or None."""
    return f"a row has {width} numbers, and its limit is {WIDEST}" if width > WIDEST else None


@op("fp8_rows")
def fp8_rows(x: Tensor, gains: Tensor | None, highest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the values and scales of x · gains. `highest` [..., 1] is the largest absolute value
    of each row, where ranks share the row."""
    rows = x.contiguous().view(-1, x.shape[-1])
    out, scales = empty(x)
    block, tile, warps = layout.row_tile_sizes(rows.shape[1])
    _programs().fp8_quantize_rows[(-(-len(rows) // tile),)](
        rows, rows if gains is None else gains.contiguous(),
        rows if highest is None else highest.contiguous(), out, scales, *rows.shape,
        GAINS=gains is not None, HIGHEST=highest is not None, ROWS=tile, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return out, scales


@fp8_rows.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty(x)


def empty(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the values and the scales of x."""
    values = torch.empty(x.shape, dtype=E4M3, device=x.device)
    return values, torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
