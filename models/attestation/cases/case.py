"""A case of a kernel: random inputs, the call of the kernel, and that of its twin."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...documents import Documents

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    rows: int
    length: int
    width: int


TINY = Shape(2, 70, 72)
"""Sizes with more than one tile of each kind; no side is a multiple of a tile."""
SHORT = Shape(2, 20, 72)
"""The same for kernels that scan tokens: the interpreter is slow on these."""
NARROW = Shape(2, 70, 40)
"""Sizes for blocks of a filter's matrix: a group of channels takes many."""


@dataclass(frozen=True)
class Draw:
    """Random numbers of a type, on a device."""

    dtype: torch.dtype
    device: str
    seed: int

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(
            zlib.crc32(f"{self.seed} {name}".encode())
        )
        x = torch.randn(shape, generator=generator, device=self.device)
        return (x * scale).to(self.dtype)

    def documents(self, shape: Shape, *, continued: bool = False) -> Documents:
        """Return a few documents for each row, one of a single token; the first may begin
        before the row."""
        if not shape.rows:
            return Documents(torch.zeros(0, shape.length, dtype=torch.int64, device=self.device))
        generator = torch.Generator().manual_seed(self.seed)
        total = shape.rows * shape.length
        cuts = torch.randint(1, max(total, 2), (4 * shape.rows,), generator=generator)
        cuts = torch.cat([cuts, cuts[:1] + 1, torch.tensor([0, total])]).clamp(max=total)
        sorted_cuts = cuts.sort().values.to(torch.int32)
        documents = Documents.from_cu_seqlens(sorted_cuts, (shape.rows, shape.length))
        positions = documents.positions
        if continued:
            positions = positions + 5 * ((positions == 0).cumsum(1) == 1)
        return Documents(positions).to(torch.device(self.device))


@dataclass(frozen=True)
class Case:
    kernel: str
    name: str
    make: Callable[[Draw, Shape], Inputs]
    run: Callable[..., Any]
    twin: Callable[..., Any]
    tiny: Shape = TINY
    """Large enough to find faults, small enough for the interpreter."""
    width: int = 0
    """Width of a case that does not take the shape's."""
    dtype_name: str = ""
    """Narrowest dtype of a case whose inputs have dtypes of their own."""

    def sized(self, name: str, width: int, dtypes: Mapping[str, torch.dtype]) -> Case:
        """Return a case of this name at one width whatever the shape, with inputs of these dtypes
        by name."""

        def make(draw: Draw, shape: Shape) -> Inputs:
            inputs = self.make(draw, replace(shape, width=width))
            return {
                name: value.to(dtypes[name]) if name in dtypes and value is not None else value
                for name, value in inputs.items()
            }

        narrowest = min(dtypes.values(), key=lambda dtype: dtype.itemsize)
        dtype_name = str(narrowest).removeprefix("torch.")
        return replace(self, name=name, make=make, width=width, dtype_name=dtype_name)
