"""Lines of gpu_step.py and their settings, in the order of their importance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from benchmarks._gpu_models import MODELS, TINY, WIDE, load_wide
from benchmarks._synthetic_run import documents
from headrace.models.config.config import ModelConfig
from headrace.models.config.options.names import Kernel
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.config.options.recompute import Recompute

BASE = "bf16"
TOKENS = 16_384
HOST_TOKENS = 2048
"""Tokens of a row with which the device is faster than the host: its time is the host's."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measured configuration."""

    model: str
    packed: bool = True
    tokens: int = TOKENS
    """Tokens of a row."""
    rows: int = 1
    """Rows of a micro-batch."""
    micro_batches: int = 1
    kernels: Kernel = "auto"
    compiled: bool = False
    recompute: Recompute = "none"
    precision: str = BASE

    @property
    def is_first(self) -> bool:
        """True for packed rows with every setting at its default."""
        return self == Line(model=self.model)

    @property
    def name(self) -> str:
        words = [
            "" if self.packed else "one document",
            "" if self.tokens == TOKENS else f"{self.rows} x {self.tokens:,} tokens",
            f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else "",
            "plain torch" if self.kernels == "torch" else "",
            "compiled" if self.compiled else "",
            f"recompute {self.recompute}" if self.recompute != "none" else "",
            "" if self.precision == BASE else self.precision,
        ]
        return ", ".join([self.model, *filter(None, words)])


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run; small in a dry one."""

    dry: bool

    @property
    def tokens(self) -> int:
        """Tokens of a row of most lines, and of a peer's."""
        return 32 if self.dry else TOKENS

    def row_tokens(self, line: Line) -> int:
        """Return the tokens of a line's row."""
        return self.tokens if self.dry else line.tokens

    @property
    def smoke_tokens(self) -> int:
        """Tokens of the step that is compared with plain torch in fp32, which needs memory."""
        return self.tokens if self.dry else 4096

    @property
    def warm(self) -> int:
        """Steps before the measured ones."""
        return 1 if self.dry else 5

    @property
    def timed(self) -> int:
        """Steps before the traced ones; those after `warm` are measured."""
        return 2 if self.dry else 20

    @property
    def traced(self) -> int:
        return 1 if self.dry else 3

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.dry else "cuda"

    def model(self, name: str) -> ModelConfig:
        if name in WIDE:
            return TINY[WIDE[name].tiny] if self.dry else load_wide(name)
        return (TINY if self.dry else MODELS)[name]

    def boundaries(self, line: Line, row: int) -> Sequence[int]:
        """Return the bounds of the documents of a row."""
        tokens = self.row_tokens(line)
        return documents(tokens, row, 8 if self.dry else 700) if line.packed else [0, tokens]

    def pairs(self, line: Line, row: int = 0) -> float:
        """Return the tokens that a token attends to, on average over a row."""
        ends = torch.tensor(self.boundaries(line, row), dtype=torch.float64)
        return float(ends.diff().square().sum()) / (2 * self.row_tokens(line))


def lines() -> list[Line]:
    """Return all lines: first each model packed and not, then one change at a time."""
    first = [Line(model=model, packed=packed) for packed in (True, False) for model in MODELS]
    wide = [
        Line(model=name, packed=False, tokens=wide.tokens, rows=wide.rows)
        for name, wide in WIDE.items()
    ]
    changes = [
        *({"precision": name} for name in PRECISIONS if name not in ("fp32", BASE)),
        {"compiled": True},
        {"tokens": HOST_TOKENS},
        {"micro_batches": 4},
        {"recompute": "block"},
        {"kernels": "torch"},
    ]
    changed = [replace(Line(model=model), **change) for change in changes for model in MODELS]
    return [*first, *wide, *changed]


def predictable() -> list[Line]:
    """Return the lines that the planner predicts: rows of one document."""
    return [line for line in lines() if not line.packed]
