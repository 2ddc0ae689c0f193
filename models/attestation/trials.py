"""Bounds, shapes and the verdict on a case: the same for tests, benchmarks, `doctor` and a run.

A case passes if no output and no gradient is further from its twin than the bound of the dtype, and
if two runs give the same bits. Rows of a trial begin at one tile, and at one tile and a token; long
ones have loops of one turn and of many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..kernels import layout
from .cases.case import Case, Draw, Shape
from .cases.compare import REPEATED, errors

BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest error for each dtype, as `cases/compare.py` measures it."""
TILE = 64
"""Tokens of a tile of most kernels."""
USUAL_PROGRAMS = layout.PROGRAMS
FEW_PROGRAMS = 64
"""Programs of a backward pass whose loops have many turns even in rows of a trial."""
TRIAL_NUMBERS = 1 << 22
"""Numbers of a long row: its twin computes in fp64, on up to 64 numbers of state for each."""
MIN_LONG, MAX_LONG = 1024, 1 << 14
"""Tokens of a long row, whatever its width."""


@dataclass(frozen=True)
class Trial:
    """Sizes of one comparison."""

    rows: int
    length: int
    width: int = 0
    """Width, for cases that have none of their own."""
    programs: int = USUAL_PROGRAMS
    """Programs among which a backward pass divides its tiles: few have loops of many turns."""
    seed: int = 1

    @property
    def shape(self) -> Shape:
        return Shape(self.rows, self.length, self.width)

    def __str__(self) -> str:
        loops = "" if self.programs == USUAL_PROGRAMS else ", loops of many turns"
        return f"{self.rows} row{'s' * (self.rows > 1)} of {self.length:,} tokens{loops}"


TABLE_TRIALS = (
    Trial(2, 1531, 1040, seed=1),
    Trial(2, 2048, 1024, seed=2),
    Trial(3, 515, 520, seed=3),
    Trial(2, TILE, 1040, seed=4),
    Trial(1, TILE + 1, 1024, seed=5),
    Trial(1, 2048, 1024, FEW_PROGRAMS, seed=6),
)
"""Trials of the cases of the table: odd lengths, multiples of every tile, one tile."""


def model_trials(longest: int, width: int, *, tiny: bool = False) -> Sequence[Trial]:
    """Return the trials of a model's case, for rows of at most `longest` tokens.

    A long row has the remainder of the longest by 16: programs are compiled for it. `tiny` leaves
    out long rows.
    """
    if tiny:
        return [Trial(1, min(TILE + 1, longest), programs=1)]
    long = min(max(TRIAL_NUMBERS // width, MIN_LONG), MAX_LONG) // 16 * 16 + longest % 16
    trials = [
        Trial(2, TILE, seed=1),
        Trial(1, TILE + 1, seed=2),
        Trial(1, long, seed=3),
        Trial(1, long, programs=FEW_PROGRAMS, seed=4),
    ]
    return [trial for trial in trials if trial.length <= longest] or [Trial(2, longest)]


@dataclass(frozen=True)
class Verdict:
    """What a case showed on a device."""

    kernel: str
    case: str
    dtype: str
    error: float | None
    """Largest error of all trials; None if the kernel raised one."""
    problem: str | None = None
    """First failure: what, in which shape."""

    @property
    def passed(self) -> bool:
        return self.problem is None


def examine(case: Case, dtype: str, device: str, trials: Sequence[Trial]) -> Verdict:
    """Run all trials of a case, up to one that fails. `dtype` is that of the inputs, unless the
    case has its own."""
    dtype = case.dtype_name or dtype
    largest = 0.0
    for trial in trials:
        tensor_errors = run_trial(case, dtype, device, trial)
        largest = max(largest, *tensor_errors.values())
        if problem := next(_failures(tensor_errors, dtype), None):
            return Verdict(case.kernel, case.name, dtype, largest, f"{problem}, with {trial}")
    return Verdict(case.kernel, case.name, dtype, largest)


def run_trial(case: Case, dtype: str, device: str, trial: Trial) -> dict[str, float]:
    """Return the error of every output and gradient, as in `errors`."""
    drawn = torch.float32 if case.dtype_name else getattr(torch, dtype)
    with _dividing_among(trial.programs):
        return errors(case, Draw(drawn, device, trial.seed), trial.shape, repeated=True)


@contextmanager
def _dividing_among(programs: int) -> Iterator[None]:
    """Let backward passes divide their tiles among this many programs."""
    usual, layout.PROGRAMS = layout.PROGRAMS, programs
    try:
        yield
    finally:
        layout.PROGRAMS = usual


def _failures(tensor_errors: dict[str, float], dtype: str) -> Iterator[str]:
    """Yield a sentence for each tensor beyond the bound."""
    for name, error in tensor_errors.items():
        if name.endswith(REPEATED):
            yield f"{name.removesuffix(REPEATED)} differs between two runs on the same inputs"
        elif error > BOUNDS[dtype]:
            yield f"{name} is wrong by {error:.1e}, and the bound for {dtype} is {BOUNDS[dtype]:g}"
