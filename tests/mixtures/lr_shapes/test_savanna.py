"""Shape savanna against its definition in iterations, as Savanna and GPT-NeoX count them."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from headrace.dataplane.order.plan import Phase, Plan, PlanSource, Stretch
from headrace.dataplane.order.source_order import SourceOrder
from headrace.mixtures.learning_rate import lr_factor
from headrace.mixtures.lr_shapes import Cosine, LearningRate, Linear, load_shape
from headrace.mixtures.lr_shapes.savanna import Savanna

BATCH = 64
"""Tokens of a step."""
STYLES = ("cosine", "linear", "exponential")


def published(n: int, style: str, lr: float, min_lr: float, warmup: float, period: int) -> float:
    """Return the rate before the optimizer step number n: `warmup` is a fraction of `period`."""
    ramp = warmup * period
    if ramp > 0 and n <= ramp:
        return lr * min(n, period - ramp) / ramp  # the floor does not hold here
    after = min(n, period - ramp) - ramp
    if style == "linear":
        rate = lr * (period - after) / period
    elif style == "cosine":
        rate = lr / 2.0 * (math.cos(math.pi * after / period) + 1)
    else:
        rate = lr * math.exp(-0.693 * after / period)
    return max(rate, min_lr)


def planned(lr: LearningRate, steps: int) -> Plan:
    rows = 4
    phase = Phase(
        name="p",
        first_row=0,
        first_step=0,
        first_token=0,
        rows=rows * steps,
        seq_len=BATCH // rows,
        batch_rows=rows,
        stretches=(Stretch(rows=rows * steps, weights=(1,)),),
        lr=asdict(lr),
    )
    order = SourceOrder(seed=0, name="a", tokens=10**7, chunk=100, window=4)
    source = PlanSource(name="a", url="a", dataset="0", generations=1, max_epochs=1, order=order)
    return Plan(seed=0, sources=(source,), phases=(phase,), tokenizer="t", vocab_size=9)


def farthest(
    lr: LearningRate, steps: int, style: str, min_factor: float, warmup: float, first: int = 0
) -> float:
    """Return the largest distance from the published rate, in multiples of the peak."""
    plan = planned(lr, steps)
    peak = 3e-4
    return max(
        abs(lr_factor(plan, n) - published(n, style, peak, min_factor * peak, warmup, steps) / peak)
        for n in range(first, steps)
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("min_factor", "warmup"), [(0.1, 0.01), (0.0, 0.05), (0.3, 0.0), (0.1, 0.5)]
)
def test_every_step_has_the_published_rate(style: str, min_factor: float, warmup: float) -> None:
    steps = 400
    lr = load_shape(
        {
            "shape": "savanna",
            "style": style,
            "end": min_factor,
            "warmup": round(warmup * steps * BATCH),
        }
    )
    assert not list(lr.problems(steps * BATCH))
    assert farthest(lr, steps, style, min_factor, warmup) < 1e-13


def test_a_period_other_than_the_phase_is_lr_decay_iters() -> None:
    for period in (150, 600):
        lr = Savanna(end=0.1, warmup=10 * BATCH, period=period * BATCH)
        plan = planned(lr, 300)
        for n in range(300):
            expected = published(n, "cosine", 1.0, 0.1, 10 / period, period)
            assert lr_factor(plan, n) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(("style", "ours"), [("cosine", Cosine), ("linear", Linear)])
def test_our_own_shapes_are_another_schedule(style: str, ours: type[LearningRate]) -> None:
    """Negative control: percents of the peak lie between the two."""
    lr = ours(shape=style, end=0.1, warmup=4 * BATCH)
    assert 0.03 < farthest(lr, 400, style, 0.1, 0.01, first=5) < 0.12


def test_wrong_settings_are_named() -> None:
    def problems(**settings: float) -> dict[str, str]:
        return dict(load_shape({"shape": "savanna", **settings}).problems(1_000))

    assert "half of the period" in problems(warmup=501)["warmup"]
    assert "half of the period" in problems(warmup=100, period=150)["warmup"]
    assert "at least 1 token" in problems(period=0)["period"]
    assert "above the peak" in problems(end=1.5)["end"]
    assert not problems(warmup=500)
