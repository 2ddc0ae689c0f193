"""Lines of gpu_step.py and their settings, in the order of their importance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from benchmarks._gpu_models import MODELS, TINY
from benchmarks._synthetic_run import documents
from headrace.models.config.config import ModelConfig
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.config.options.recompute import Recompute

BASE = "bf16"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measured configuration."""

    model: str
    packed: bool = True
    micro_batches: int = 1
    kernels: Literal["auto", "torch"] = "auto"
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
            f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else "",
            "" if self.kernels == "auto" else "plain torch",
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
        """Tokens of a row, which is a micro-batch."""
        return 32 if self.dry else 16_384

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
        return (TINY if self.dry else MODELS)[name]

    def boundaries(self, packed: bool, row: int) -> Sequence[int]:
        if not packed:
            return [0, self.tokens]
        return documents(self.tokens, row, 8 if self.dry else 700)

    def pairs(self, packed: bool, row: int = 0) -> float:
        """Return the tokens that a token attends to, on average over a row."""
        ends = torch.tensor(self.boundaries(packed, row), dtype=torch.float64)
        return float(ends.diff().square().sum()) / (2 * self.tokens)


def lines() -> list[Line]:
    """Return all lines: first each model packed and not, then one change at a time."""
    first = [Line(model=model, packed=packed) for packed in (True, False) for model in MODELS]
    changes = [
        {"compiled": True},
        *({"precision": name} for name in PRECISIONS if name not in ("fp32", BASE)),
        {"micro_batches": 4},
        {"recompute": "block"},
        {"kernels": "torch"},
    ]
    return [
        *first,
        *(replace(Line(model=model), **change) for change in changes for model in MODELS),
    ]


def predictable() -> list[Line]:
    """Return the lines that the planner predicts: rows of one document."""
    return [line for line in lines() if not line.packed]
