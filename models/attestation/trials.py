"""Bounds, sizes and the verdict on a case, shared by tests, benchmarks, `doctor` and runs.

A case passes if every output and gradient is within the dtype's bound from its twin, and two runs
give equal bits. Trials begin with rows of one tile, and of one tile and a token; long rows have
loops with one turn and with many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..kernels import layout
from .cases.case import Case, Draw, InputShape
from .cases.compare import REPEATED, measure_errors

BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest error by dtype, in the measure of `cases/compare.py`."""
TILE = 64
"""Tokens in most kernels' tiles."""
DEFAULT_PROGRAMS = layout.PROGRAMS
FEW_PROGRAMS = 64
"""Programs in a backward pass: so few that loops have many turns even in a trial's rows."""
TRIAL_ELEMENTS = 1 << 22
"""Elements in a long row: the twin computes in fp64, with up to 64 values of state for each."""
MIN_LONG, MAX_LONG = 1024, 1 << 14
"""Tokens in a long row, at any width."""


@dataclass(frozen=True)
class Trial:
    """Sizes and seed for a comparison."""

    rows: int
    length: int
    width: int = 0
    """Width, for cases that do not fix theirs."""
    programs: int = DEFAULT_PROGRAMS
    """Programs that divide the tiles in a backward pass: few have loops with many turns."""
    seed: int = 1

    @property
    def shape(self) -> InputShape:
        return InputShape(self.rows, self.length, self.width)

    def __str__(self) -> str:
        loops = "" if self.programs == DEFAULT_PROGRAMS else ", loops of many turns"
        return f"{self.rows} row{'s' * (self.rows > 1)} of {self.length:,} tokens{loops}"


TABLE_TRIALS = (
    Trial(2, 1531, 1040, seed=1),
    Trial(2, 2048, 1024, seed=2),
    Trial(3, 515, 520, seed=3),
    Trial(2, TILE, 1040, seed=4),
    Trial(1, TILE + 1, 1024, seed=5),
    Trial(1, 2048, 1024, FEW_PROGRAMS, seed=6),
)
"""Trials for the table: odd lengths, multiples of every tile, one tile."""


def model_trials(
    longest: int, width: int, *, tiny: bool = False, max_length: int = 0
) -> Sequence[Trial]:
    """Return trials for a model's case, in rows up to `longest` tokens.

    Long rows have the remainder by 16 that the longest row has: programs are compiled for it.
    `tiny` leaves out long rows, `max_length` limits them.
    """
    if tiny:
        return [Trial(1, min(TILE + 1, longest), programs=1)]
    long = (
        min(max(TRIAL_ELEMENTS // width, MIN_LONG), max_length or MAX_LONG) // 16 * 16
        + longest % 16
    )
    trials = [
        Trial(2, TILE, seed=1),
        Trial(1, TILE + 1, seed=2),
        Trial(1, long, seed=3),
        Trial(1, long, programs=FEW_PROGRAMS, seed=4),
    ]
    return [trial for trial in trials if trial.length <= longest] or [Trial(2, longest)]


@dataclass(frozen=True)
class Verdict:
    """The result for a case on a device."""

    kernel: str
    case: str
    dtype: str
    error: float | None
    """Largest error in all trials; None if the kernel raised an exception."""
    problem: str | None = None
    """First failure, with the trial's sizes."""

    @property
    def passed(self) -> bool:
        return self.problem is None


def examine(case: Case, dtype: str, device: str, trials: Sequence[Trial]) -> Verdict:
    """Run trials until one fails. `dtype` is for inputs whose dtype the case does not fix."""
    dtype = case.dtype_name or dtype
    largest = 0.0
    for trial in trials:
        tensor_errors = run_trial(case, dtype, device, trial)
        largest = max(largest, *tensor_errors.values())
        if problem := next(_failures(tensor_errors, dtype), None):
            return Verdict(case.kernel, case.name, dtype, largest, f"{problem}, with {trial}")
    return Verdict(case.kernel, case.name, dtype, largest)


def run_trial(case: Case, dtype: str, device: str, trial: Trial) -> dict[str, float]:
    """Return errors by tensor, as in `measure_errors`."""
    drawn_dtype = torch.float32 if case.dtype_name else getattr(torch, dtype)
    with limit_programs(trial.programs):
        return measure_errors(
            case, Draw(drawn_dtype, device, trial.seed), trial.shape, repeated=True
        )


@contextmanager
def limit_programs(programs: int) -> Iterator[None]:
    """Divide tiles in backward passes among this many programs."""
    before, layout.PROGRAMS = layout.PROGRAMS, programs
    try:
        yield
    finally:
        layout.PROGRAMS = before


def _failures(tensor_errors: dict[str, float], dtype: str) -> Iterator[str]:
    """Yield a sentence for each tensor beyond the bound or with other bits in a second run."""
    for name, error in tensor_errors.items():
        if name.endswith(REPEATED):
            yield f"{name.removesuffix(REPEATED)} differs between two runs on the same inputs"
        elif error > BOUNDS[dtype]:
            yield f"{name} is wrong by {error:.1e}, and the bound for {dtype} is {BOUNDS[dtype]:g}"
