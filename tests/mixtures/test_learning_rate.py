"""The learning rate of a step, computed from its plan."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from headrace.dataplane.order.plan import Phase, Plan, PlanSource, Stretch
from headrace.dataplane.order.source_order import SourceOrder
from headrace.mixtures.learning_rate import learning_rate_at, lr_factor
from headrace.mixtures.lr_shapes import Constant, LearningRate, Linear

TOKENS = 1_000


def phase(lr: LearningRate) -> Phase:
    return Phase(
        name="p",
        first_row=0,
        first_step=0,
        first_token=0,
        rows=100,
        seq_len=10,
        batch_rows=2,
        stretches=(Stretch(rows=100, weights=(1,)),),
        lr=asdict(lr),
    )


def test_step_uses_the_rate_in_the_middle_of_its_tokens() -> None:
    first = phase(Constant(warmup=TOKENS))
    second = replace(phase(Linear(peak=0.75)), first_row=100, first_step=50, first_token=TOKENS)
    order = SourceOrder(seed=0, name="a", tokens=10**6, chunk=100, window=4)
    source = PlanSource(name="a", url="a", dataset="0", generations=1, max_epochs=1, order=order)
    plan = Plan(seed=0, sources=(source,), phases=(first, second), tokenizer="t", vocab_size=9)
    assert lr_factor(plan, 0) == pytest.approx(0.01)
    assert lr_factor(plan, 49) == pytest.approx(0.99)
    assert lr_factor(plan, 50) == pytest.approx(0.75 * 0.99)
    assert lr_factor(plan, 99) == pytest.approx(0.75 * 0.01)


def test_phase_without_settings_is_constant_at_the_peak() -> None:
    bare = replace(phase(Constant()), lr={})
    assert learning_rate_at(bare, 0) == learning_rate_at(bare, TOKENS) == 1.0
