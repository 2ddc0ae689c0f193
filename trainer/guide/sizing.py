"""Choose the largest model that this machine can train in a given time, from measured steps.

A model of N parameters should read 20 N tokens (Hoffmann et al. 2022), and gains little from more
than four readings of a corpus (Muennighoff et al. 2023). The choice is the largest model that can
read that many tokens in the time. Its speed is measured. The speed of models that were not tried is
predicted from the nearest one that was, and decides only which one to try next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

TOKENS_PER_PARAMETER = 20
MAX_EPOCHS = 4
TUNING_EPOCHS = 2
STEPS = 1_000
"""Steps of a run, unless its batch would be smaller than a micro-batch."""
MAX_BATCH = 1 << 19
EVALUATIONS, EVALUATED_ROWS = 20, 32
"""Evaluations in a run, and rows of one."""
EVALUATION_SHARE = 0.1
"""Share of the time for steps that evaluations may add."""
PASSES = 3
"""Forward passes that take as long as a row's step: its backward pass takes two."""

PATTERN = "[se, mr, li, mamba, se, mr, attention]"
"""Layers of `hybrid-50m`, repeated by each size."""
WIDTHS = (
    (128, 1),
    (256, 1),
    (384, 2),
    (512, 2),
    (768, 3),
    (1024, 4),
    (1536, 4),
    (2048, 5),
)
"""Widths and repetitions of the pattern, by size."""
MICRO_BATCHES: dict[Literal["cpu", "cuda"], tuple[tuple[int, str], ...]] = {
    "cpu": ((2048, "none"), (1024, "none"), (1024, "block")),
    "cuda": ((32768, "none"), (16384, "none"), (8192, "none"), (16384, "block"), (4096, "block")),
}
"""Micro-batches in tokens with their recompute, the fastest first."""


@dataclass(frozen=True)
class Candidate:
    name: str
    model: str | None
    """A shipped model; None: the model of the initial weights."""
    overrides: tuple[str, ...]
    parameters: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """Words of `trainer run` that choose the model."""
        return (*(() if self.model is None else ("--model", self.model)), *self.overrides)


@dataclass(frozen=True)
class Layout:
    processes: int
    micro_batch: int
    """Tokens that a rank computes on at once."""
    recompute: str

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            "engine.kind=fsdp2",
            f"micro_batch_tokens={self.micro_batch}",
            f"recompute={self.recompute}",
        )

    @property
    def words(self) -> tuple[str, ...]:
        """Words of `trainer run` that choose the layout."""
        return ("--processes", str(self.processes), *self.overrides)


@dataclass(frozen=True)
class Trial:
    layout: Layout
    tokens_per_second: float


@dataclass(frozen=True)
class Budget:
    seconds: float
    """Time for training."""
    corpus_tokens: int
    epochs: int = MAX_EPOCHS

    def tokens(self, tokens_per_second: float) -> int:
        """Return the tokens that a run at this speed can read."""
        return int(min(self.seconds * tokens_per_second, self.epochs * self.corpus_tokens))

    def suffices(self, parameters: int, tokens_per_second: float) -> bool:
        return self.tokens(tokens_per_second) >= TOKENS_PER_PARAMETER * parameters


def list_sizes(vocab_size: int) -> list[Candidate]:
    """Return the sizes of `hybrid-50m`, the smallest first, without their parameters."""
    return [
        Candidate(
            f"width-{width}",
            "hybrid-50m",
            (
                f"model.vocab_size={vocab_size}",
                f"model.width={width}",
                f"model.pattern='{PATTERN} * {repeats}'",
                f"model.operators.attention.heads={max(width // 64, 2)}",
                f"model.operators.glu.hidden={width * 11 // 4}",
            ),
        )
        for width, repeats in WIDTHS
    ]


def choose(
    candidates: Sequence[Candidate],
    measure: Callable[[Candidate], Trial | None],
    budget: Callable[[], Budget],
) -> tuple[Candidate, Trial] | None:
    """Return the largest candidate that the budget suffices for, with its trial, else the smallest.

    `measure` returns None for a candidate that does not fit this machine; then larger ones do not
    either. Return None if the smallest does not fit. `budget` is what the trials so far left.
    """
    trials: dict[int, Trial] = {}
    end, number = len(candidates), 0
    while number not in trials:
        trial = measure(candidates[number])
        if trial is None:
            end = number
        else:
            trials[number] = trial
        if end == 0:
            return None
        number = _largest(candidates[:end], trials, budget())
    return candidates[number], trials[number]


def _largest(candidates: Sequence[Candidate], trials: dict[int, Trial], budget: Budget) -> int:
    for number in range(len(candidates) - 1, 0, -1):
        nearest = min(trials, key=lambda tried: abs(tried - number))
        speed = trials[nearest].tokens_per_second
        speed *= candidates[nearest].parameters / candidates[number].parameters
        if budget.suffices(candidates[number].parameters, speed):
            return number
    return 0


def choose_batch(tokens: int, processes: int, seq_len: int) -> int:
    """Return a step's tokens: a power of two of rows on each rank, for about `STEPS` steps."""
    batch = processes * seq_len
    while 2 * batch <= min(tokens // STEPS, MAX_BATCH):
        batch *= 2
    return batch


def learning_rate(parameters: int) -> float:
    """Return a learning rate: 4e-4 for a billion parameters, more for smaller models."""
    return float(f"{min(4e-4 * (1e9 / parameters) ** 0.25, 3e-3):.1e}")


def choose_vocab_size(corpus_bytes: int, device: Literal["cpu", "cuda"]) -> int:
    """Return the size of the vocabulary for a corpus.

    On a CPU, models are so small that a large vocabulary would take most of their parameters.
    """
    for size, vocab in ((1 << 20, 1024), (1 << 26, 4096), (1 << 30, 8192)):
        if corpus_bytes < size or (device == "cpu" and vocab == 8192):
            return vocab
    return 32768


def evaluation_interval(steps: int, batch_rows: int) -> int:
    """Return the steps between evaluations: EVALUATIONS of them in a run, fewer in a short one,
    whose time they would fill."""
    evaluation_steps = EVALUATED_ROWS / (PASSES * batch_rows)
    return min(max(steps // EVALUATIONS, math.ceil(evaluation_steps / EVALUATION_SHARE), 1), steps)
