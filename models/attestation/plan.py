"""Cases, dtypes and trials to attest, for a model's calls or the full table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch

from ..kernels import choice
from .calls import Call
from .cases import all_cases
from .cases.case import Case
from .cases.fp8 import attested_fp8_cases
from .model_cases import build_cases
from .trials import BOUNDS, TABLE_TRIALS, Trial, model_trials


class Subject(NamedTuple):
    """A case to examine."""

    case: Case
    dtype: str
    """Dtype of the inputs."""
    trials: Sequence[Trial]


@dataclass(frozen=True, kw_only=True)
class AttestationPlan:
    calls: Sequence[Call] | None = None
    """A model's calls; None: the table of all cases."""
    longest: int = 0
    """Tokens in a model's longest row."""
    dtypes: Sequence[str] = field(default_factory=lambda: list(BOUNDS))
    """Input dtypes, for the table."""
    kernels: Sequence[str] | None = None
    """Kernels to attest, for the table; None: all."""
    tiny: bool = False
    """True for Triton's interpreter: small sizes, and no FP8, which it truncates."""

    def subjects(self) -> list[Subject]:
        if self.calls is None:
            cases = [
                case
                for case in (*all_cases(), *([] if self.tiny else attested_fp8_cases()))
                if self.kernels is None or case.kernel in self.kernels
            ]
            return [
                Subject(case, dtype, self._table_trials(case))
                for case in cases
                for dtype in self.dtypes
                if (case.kernel, getattr(torch, dtype)) not in choice.FAULTY
            ]
        return [
            Subject(case, case.dtype_name, model_trials(self.longest, case.width, tiny=self.tiny))
            for case in build_cases(self.calls)
        ]

    def _table_trials(self, case: Case) -> Sequence[Trial]:
        if not self.tiny:
            return TABLE_TRIALS
        return [Trial(case.tiny.rows, case.tiny.length, case.tiny.width)]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, data: str) -> AttestationPlan:
        values = json.loads(data)
        if values["calls"] is not None:
            values["calls"] = [Call(**call) for call in values["calls"]]
        return cls(**values)
