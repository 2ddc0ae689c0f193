"""Each learning-rate shape against its closed form, and what all shapes have in common."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.console.errors import PlanError
from headrace.mixtures.lr_shapes import DEFAULT_SHAPE, SHAPES, LearningRate, load_shape

TOKENS = 1_000
PEAK, END, DECAY = 0.8, 0.1, 300
CLOSED_FORMS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: PEAK,
    "linear": lambda done: PEAK - 0.7 * done,
    "cosine": lambda done: END + 0.7 * 0.5 * (1 + math.cos(math.pi * done)),
    "exponential": lambda done: PEAK * (END / PEAK) ** done,
    "savanna": lambda done: max(
        PEAK * 0.5 * (1 + math.cos(math.pi * 0.8 * min(done, 600 / 800))), END
    ),
    "wsd": lambda done: PEAK if 800 * done < 500 else PEAK - 0.7 * (800 * done - 500) / DECAY,
}
"""The rate when a part `done` of the 800 tokens after the warm-up has been trained on."""


def shape(name: str, **settings: float) -> LearningRate:
    settings |= {} if name == "constant" else {"end": END}
    settings |= {"decay": DECAY} if name == "wsd" else {}
    return load_shape({"shape": name, "peak": PEAK, **settings})


def test_every_shape_has_a_closed_form_here() -> None:
    assert set(CLOSED_FORMS) == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
@given(token=st.floats(0, TOKENS))
def test_shape_equals_its_closed_form(name: str, token: float) -> None:
    expected = 0.2 + 0.6 * token / 200 if token < 200 else CLOSED_FORMS[name]((token - 200) / 800)
    rate = shape(name, warmup=200, warmup_from=0.2).factor(token, TOKENS)
    assert rate == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_sound_settings_have_no_problems(name: str) -> None:
    assert not list(shape(name, warmup=200).problems(TOKENS))


@pytest.mark.parametrize("name", SHAPES)
def test_warmup_of_the_whole_phase_ends_at_the_peak(name: str) -> None:
    """No shape divides by the 0 tokens that are left."""
    rate = shape(name, warmup=TOKENS).factor(TOKENS - 1e-9, TOKENS)
    assert rate == pytest.approx(PEAK)
    assert math.isfinite(shape(name, warmup=TOKENS).factor(TOKENS, TOKENS))


def test_registered_name_is_the_name_in_the_dataclass() -> None:
    for name in SHAPES:
        assert shape(name).shape == name
    assert load_shape({}).shape == DEFAULT_SHAPE


def test_plan_with_an_unknown_shape_is_an_error() -> None:
    with pytest.raises(PlanError, match="learning-rate shape `stairs`"):
        load_shape({"shape": "stairs", "peak": 1.0})
