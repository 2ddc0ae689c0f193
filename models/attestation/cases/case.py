"""A case: random inputs, a kernel, and its twin."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...documents import Documents

Inputs = dict[str, Any]


@dataclass(frozen=True)
class InputShape:
    rows: int
    length: int
    width: int


TINY = InputShape(2, 70, 72)
"""More than one tile along every side; no side is a multiple of a tile."""
SHORT = InputShape(2, 20, 72)
"""For kernels that scan tokens: the interpreter is slow on these."""
NARROW = InputShape(2, 70, 40)
"""For blocks in a filter's matrix: every channel group takes many."""


@dataclass(frozen=True)
class Draw:
    """Random tensors with a dtype, on a device."""

    dtype: torch.dtype
    device: str
    seed: int

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(
            zlib.crc32(f"{self.seed} {name}".encode())
        )
        x = torch.randn(shape, generator=generator, device=self.device)
        return (x * scale).to(self.dtype)

    def documents(self, shape: InputShape, *, continued: bool = False) -> Documents:
        """Return a few documents for every row, one with a single token. `continued` lets the first
        begin before its row."""
        if not shape.rows:
            return Documents(torch.zeros(0, shape.length, dtype=torch.int64, device=self.device))
        generator = torch.Generator().manual_seed(self.seed)
        total = shape.rows * shape.length
        cuts = torch.randint(1, max(total, 2), (4 * shape.rows,), generator=generator)
        cuts = torch.cat([cuts, cuts[:1] + 1, torch.tensor([0, total])]).clamp(max=total)
        sorted_cuts = cuts.sort().values.to(torch.int32)
        documents = Documents.build(sorted_cuts, (shape.rows, shape.length))
        positions = documents.positions
        if continued:
            positions = positions + 5 * ((positions == 0).cumsum(1) == 1)
        return Documents(positions).to(torch.device(self.device))


@dataclass(frozen=True)
class Case:
    kernel: str
    name: str
    make: Callable[[Draw, InputShape], Inputs]
    run: Callable[..., Any]
    twin: Callable[..., Any]
    tiny: InputShape = TINY
    """Large enough to show faults, small enough for the interpreter."""
    width: int = 0
    """Width, if the case fixes it; 0: the shape's."""
    dtype_name: str = ""
    """Narrowest input dtype, if the case fixes dtypes; empty: the draw's."""
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around a comparison."""
    repeatable: bool = True
    """True if two runs on the same inputs have equal bits; False: both are compared by value."""
    max_length: int = 0
    """Tokens in a long row, if the twin's cost limits them; 0: the trial's."""

    def fix_sizes(self, name: str, width: int, dtypes: Mapping[str, torch.dtype]) -> Case:
        """Return a case with this name, a fixed width, and fixed dtypes by input."""

        def make(draw: Draw, shape: InputShape) -> Inputs:
            inputs = self.make(draw, replace(shape, width=width))
            return {
                key: value.to(dtypes[key]) if key in dtypes and value is not None else value
                for key, value in inputs.items()
            }

        narrowest = min(dtypes.values(), key=lambda dtype: dtype.itemsize)
        dtype_name = str(narrowest).removeprefix("torch.")
        return replace(self, name=name, make=make, width=width, dtype_name=dtype_name)
