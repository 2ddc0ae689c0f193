"""What an attestation compares: the cases of a model's calls, or those of the table."""

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
from .model_cases import cases_of
from .trials import BOUNDS, TABLE_TRIALS, Trial, model_trials


class Subject(NamedTuple):
    """A case, the dtype of its inputs, and its trials."""

    case: Case
    dtype: str
    trials: Sequence[Trial]


@dataclass(frozen=True, kw_only=True)
class Plan:
    calls: Sequence[Call] | None = None
    """Calls of a model; None: the table of all cases."""
    longest: int = 0
    """Tokens of a model's longest row."""
    dtypes: Sequence[str] = field(default_factory=lambda: list(BOUNDS))
    """Dtypes of the cases of the table."""
    kernels: Sequence[str] | None = None
    """Kernels of the table; None: all."""
    tiny: bool = False
    """True for the sizes of Triton's interpreter, without FP8, which it truncates."""

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
            for case in cases_of(self.calls)
        ]

    def _table_trials(self, case: Case) -> Sequence[Trial]:
        if not self.tiny:
            return TABLE_TRIALS
        return [Trial(case.tiny.rows, case.tiny.length, case.tiny.width)]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        values = json.loads(text)
        if values["calls"] is not None:
            values["calls"] = [Call(**call) for call in values["calls"]]
        return cls(**values)
