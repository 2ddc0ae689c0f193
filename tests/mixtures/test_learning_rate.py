from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataplane.order.plan import Phase, Plan, PlanSource, Stretch
from headrace.dataplane.order.source_order import SourceOrder
from headrace.mixtures.learning_rate import lr_at, lr_factor
from headrace.mixtures.spec.mixture import LearningRate

TOKENS = 1_000


def phase(**lr) -> Phase:
    return Phase(
        name="p",
        first_row=0,
        first_step=0,
        first_token=0,
        rows=100,
        seq_len=10,
        batch_rows=2,
        stretches=(Stretch(rows=100, weights=(1,)),),
        lr=asdict(LearningRate(**lr)),
    )


CLOSED = {
    "constant": lambda x: 0.8,
    "linear": lambda x: 0.8 - 0.7 * x,
    "cosine": lambda x: 0.1 + 0.7 * 0.5 * (1 + math.cos(math.pi * x)),
    "exponential": lambda x: 0.8 * (0.1 / 0.8) ** x,
}


@pytest.mark.parametrize("shape", CLOSED)
@given(token=st.floats(0, TOKENS))
def test_shapes_against_their_closed_forms(shape, token):
    end = {} if shape == "constant" else {"end": 0.1}
    curve = phase(peak=0.8, warmup=200, warmup_from=0.2, shape=shape, **end)
    wanted = 0.2 + 0.6 * token / 200 if token < 200 else CLOSED[shape]((token - 200) / 800)
    assert lr_at(curve, token) == pytest.approx(wanted, rel=1e-12)


@given(token=st.floats(0, TOKENS))
def test_wsd_is_constant_until_its_decay(token):
    curve = phase(peak=0.5, warmup=100, shape="wsd", decay=300, end=0.05)
    wanted = (
        0.5 * token / 100
        if token < 100
        else 0.5
        if token < 700
        else 0.5 - 0.45 * (token - 700) / 300
    )
    assert lr_at(curve, token) == pytest.approx(wanted, rel=1e-12)


def test_a_step_has_the_rate_of_the_middle_of_its_tokens():
    first = phase(warmup=1_000)
    second = replace(
        phase(shape="linear", peak=0.75), first_row=100, first_step=50, first_token=1_000
    )
    order = SourceOrder(seed=0, name="a", tokens=10**6, chunk=100, window=4)
    source = PlanSource(name="a", url="a", dataset="0", generations=1, max_epochs=1, order=order)
    plan = Plan(seed=0, sources=(source,), phases=(first, second), tokenizer="t", vocab_size=9)
    assert lr_factor(plan, 0) == pytest.approx(0.01)
    assert lr_factor(plan, 49) == pytest.approx(0.99)
    assert lr_factor(plan, 50) == pytest.approx(0.75 * 0.99)
    assert lr_factor(plan, 99) == pytest.approx(0.75 * 0.01)


def test_a_warm_up_of_the_whole_phase_never_divides_by_nothing():
    assert lr_at(phase(warmup=TOKENS, shape="cosine"), TOKENS) == pytest.approx(1.0)
