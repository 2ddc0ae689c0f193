"""Cases, dtypes and trials to attest, for a model's calls or the full table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch

from ..kernels import choice
from ..layers.attention.limits import AttentionCall
from ..layers.attention.order import Implementation
from .calls import Call
from .cases import all_cases
from .cases.attention import attention_cases
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
    attention: Sequence[AttentionCall] = field(default_factory=list)
    """Calls of attention."""
    order: Sequence[Implementation] = field(default_factory=list)
    """Implementations of attention, in the order in which torch tries them."""
    deterministic: bool = False
    """True if attention must have equal bits in two runs."""
    next_programs: Sequence[str] = field(default_factory=list)
    """Kernels whose next programs are attested in place of the confirmed ones."""
    tiny: bool = False
    """True for Triton's interpreter: small sizes, and no FP8, which it truncates."""

    def subjects(self) -> list[Subject]:
        return [*self._kernel_subjects(), *self._attention_subjects()]

    def _attention_subjects(self) -> Iterator[Subject]:
        for case in attention_cases(self.attention, self.order, deterministic=self.deterministic):
            trials = model_trials(
                self.longest or case.max_length, case.width, max_length=case.max_length
            )
            yield Subject(case, case.dtype_name, trials)

    def _kernel_subjects(self) -> list[Subject]:
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
        values["attention"] = [AttentionCall(**call) for call in values["attention"]]
        return cls(**values)
