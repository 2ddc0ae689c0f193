"""Choosing a model for a given time, on machines whose speed is known."""

from __future__ import annotations

import pytest

from headrace.models.accounting.count import build_meta, count_parameters
from headrace.models.config.config import ModelConfig
from headrace.trainer.guide import sizing
from headrace.trainer.guide.sizing import Budget, Candidate, Layout, Trial
from headrace.trainer.run.request import RunRequest
from headrace.trainer.run.resolve import resolve

SIZES = [10**6, 4 * 10**6, 2 * 10**7, 10**8, 5 * 10**8, 10**9]
LAYOUT = Layout(1, 1024, "none")
CANDIDATES = [Candidate(str(size), None, (), size) for size in SIZES]


class Machine:
    """A machine that trains at `flops`, with models up to `limit` parameters."""

    def __init__(self, flops: float, limit: float = 1e12) -> None:
        self.flops, self.limit = flops, limit
        self.measured: list[int] = []

    def speed(self, parameters: int) -> float:
        return self.flops / (6 * parameters)

    def measure(self, candidate: Candidate) -> Trial | None:
        self.measured.append(candidate.parameters)
        if candidate.parameters > self.limit:
            return None
        return Trial(LAYOUT, self.speed(candidate.parameters))


@pytest.mark.parametrize("flops", [1e9, 1e11, 1e13, 1e15])
@pytest.mark.parametrize("tokens", [10**5, 10**8, 10**12])
@pytest.mark.parametrize("limit", [2e6, 2e8, 1e12])
def test_the_choice_is_the_largest_model_that_reads_enough(flops, tokens, limit):
    machine, budget = Machine(flops, limit), Budget(3600, tokens)
    choice = sizing.choose(CANDIDATES, machine.measure, lambda: budget)
    assert choice is not None
    candidate, trial = choice
    enough = [
        size
        for size in SIZES
        if size <= limit and min(3600 * machine.speed(size), 4 * tokens) >= 20 * size
    ]
    assert candidate.parameters == max(enough, default=SIZES[0])
    assert trial.tokens_per_second == machine.speed(candidate.parameters)
    assert candidate.parameters in machine.measured
    assert len(set(machine.measured)) == len(machine.measured)


def test_the_speed_of_the_choice_was_measured_where_large_models_are_slow():
    """The prediction from the smallest model is four times too fast for the others."""
    machine = Machine(1e13)
    machine.speed = lambda size: 1e13 / (6 * size) / (4 if size > SIZES[0] else 1)
    choice = sizing.choose(CANDIDATES, machine.measure, lambda: Budget(3600, 10**12))
    assert choice is not None
    candidate, trial = choice
    assert Budget(3600, 10**12).suffices(candidate.parameters, machine.speed(candidate.parameters))
    larger = SIZES[SIZES.index(candidate.parameters) + 1]
    assert not Budget(3600, 10**12).suffices(larger, machine.speed(larger))
    assert trial.tokens_per_second == machine.speed(candidate.parameters)


def test_no_choice_if_the_smallest_does_not_fit():
    assert sizing.choose(CANDIDATES, Machine(1e9, 0).measure, lambda: Budget(1, 1)) is None


def test_sizes_are_models_and_grow(tmp_path):
    def count(candidate: Candidate) -> int:
        words = (*candidate.overrides, "synthetic.steps=1")
        request = RunRequest(
            model=candidate.model, out=str(tmp_path), overrides=words, dry_run=True
        )
        model: ModelConfig = resolve(request).model
        assert model.vocab_size == 300
        return count_parameters(build_meta(model))

    smallest, *_, largest = counts = [count(size) for size in sizing.list_sizes(300)]
    assert counts == sorted(counts)
    assert smallest < 2e6
    assert largest > 1e9


def test_batches_are_rows_of_all_ranks_in_about_a_thousand_steps():
    for tokens in (10**4, 10**6, 10**8, 10**12):
        batch = sizing.choose_batch(tokens, 2, 512)
        assert batch % (2 * 512) == 0
        assert batch == 1024 or batch == sizing.MAX_BATCH or 1000 <= tokens / batch < 2000
    assert sizing.choose_batch(10**8, 1, 512) == 1 << 16


@pytest.mark.parametrize(
    ("steps", "batch_rows", "interval"),
    [(1, 1, 1), (9, 2, 9), (200, 2, 54), (40, 64, 2), (100_000, 64, 5_000)],
)
def test_evaluations_take_a_tenth_of_the_time_at_most(
    steps: int, batch_rows: int, interval: int
) -> None:
    assert sizing.evaluation_interval(steps, batch_rows) == interval
    evaluations = steps // interval
    evaluated = evaluations * sizing.EVALUATED_ROWS
    assert evaluations == 1 or evaluated <= 0.1 * 3 * steps * batch_rows
