from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.models.config.pattern import Layer, parse_pattern


def names(text: str) -> list[str]:
    return [str(layer) for layer in parse_pattern(text, mlp=None)]


def test_lists_repeats_and_sums() -> None:
    assert names("[se, mr, li] * 2 + [attention]") == ["se", "mr", "li"] * 2 + ["attention"]
    assert names("([a] * 2 + [b]) * 2") == ["a", "a", "b"] * 2
    assert names("[[a, b] * 2, c]") == ["a", "b", "a", "b", "c"]
    assert names("a * 3 + mamba-2.x") == ["a", "a", "a", "mamba-2.x"]
    assert names(" [ a ,b, ]\n + [c]*1") == ["a", "b", "c"]


def test_a_layer_names_its_mlp_and_what_feeds_it() -> None:
    layers = parse_pattern("[a, a/moe, a/none, s>a, s > a / moe, a&moe, s>a & moe]", mlp="glu")
    assert layers == (
        Layer("a", "glu"),
        Layer("a", "moe"),
        Layer("a", None),
        Layer("a", "glu", "s"),
        Layer("a", "moe", "s"),
        Layer("a", "moe", parallel=True),
        Layer("a", "moe", "s", parallel=True),
    )
    assert [str(layer) for layer in layers[-3:]] == ["s>a", "a&moe", "s>a&moe"]


def test_two_mixers_stand_side_by_side() -> None:
    layers = parse_pattern("[a|b, s>a | b/none, a|b&moe]", mlp="glu")
    assert layers == (
        Layer("a", "glu", second="b"),
        Layer("a", None, "s", second="b"),
        Layer("a", "moe", parallel=True, second="b"),
    )
    assert [str(layer) for layer in layers] == ["a|b", "s>a|b", "a|b&moe"]
    assert layers[0].branches == ["a", "b", "glu"] and layers[1].names == ["a", "b", "s"]
    with pytest.raises(ValueError, match="syntax error"):
        parse_pattern("[a|b|c]", mlp=None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a, b", ["`,` or `]`", "the end"]),
        ("[a b]", ["`,` or `]`", "`b]`"]),
        ("[a&none]", ["nothing beside its mixer", "`a/none`"]),
        ("[a] * b", ["a number", "`b`"]),
        ("[a] *", ["a number", "the end"]),
        ("[a] + ", ["the name of an operator", "the end"]),
        ("[a] ]", ["expected the end", "`]`"]),
        ("([a]", ["`)`"]),
        ("[5]", ["the name of an operator", "`5]`"]),
        ("[a/]", ["`,` or `]`", "`/]`"]),
        ("[]", ["no layer"]),
        ("[a] * 0", ["no layer"]),
        ("[a] * 99999999", ["more than 10000"]),
    ],
)
def test_syntax_errors(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        parse_pattern(text, mlp=None)
    for word in words:
        assert word in str(raised.value)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), min_size=1, max_size=6))
def test_a_sum_of_repeats_is_their_concatenation(parts: list[tuple[str, int]]) -> None:
    text = " + ".join(f"[{name}] * {count}" for name, count in parts)
    assert names(text) == [name for name, count in parts for _ in range(count)]
