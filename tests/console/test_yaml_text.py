"""YAML: what looks like a number is one, everything else is text, every value has a line."""

import math
import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.console import yaml_text
from headrace.console.errors import ConfigError

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(
        ["900B", "1e-4", "no", "on", "010", "12:30", "0x1F", "~", "", "<<", "-", "1_0"]
    )
)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), documents, max_size=5))
def test_emitted_yaml_is_read_back(data: dict[str, object]) -> None:
    read, _ = yaml_text.parse(yaml_text.emit(data), source="it")
    assert repr(read) == repr(data)  # repr tells 1, 1.0 and True apart


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("3", 3),
        ("-3", -3),
        ("1_000", 1000),
        ("0x1F", 31),
        (".inf", math.inf),
        ("900B", 900_000_000_000),
        ("8Ki", 8192),
        ("0.5M", 500_000),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("no", "no"),
        ("010", "010"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("7b", "7b"),
        ("1e", "1e"),
        ("'900B'", "900B"),
        ("[1, 2K]", [1, 2000]),
    ],
)
def test_numbers_and_text_are_told_apart(text: str, value: object) -> None:
    assert repr(yaml_text.value(text)) == repr(value)


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from("KMBT"))
def test_counts_are_exact(whole: int, thousandths: int, suffix: str) -> None:
    exact = Fraction(f"{whole}.{thousandths:03d}") * 1000 ** ("KMBT".index(suffix) + 1)
    assert exact.denominator == 1
    assert yaml_text.count(f"{whole}.{thousandths:03d}{suffix}") == exact


@pytest.mark.parametrize("text", ["", "B", "1.5", "900 B", "-1K", "1k", "1.K"])
def test_invalid_counts_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="is not a count"):
        yaml_text.count(text)


def test_a_count_remembers_its_text() -> None:
    """The key decides what it means: after a size, B is bytes."""
    (result,) = yaml_text.value("[64B]")
    assert (result, result.text, type(result + 0)) == (64 * 10**9, "64B", int)
    assert pickle.loads(pickle.dumps(result)).text == "64B"
    assert yaml_text.emit({"n": result}) == "n: 64000000000\n"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("64", 64),
        ("64e6", 64 * 10**6),
        ("1.5e3 KB", 1_500_000),
        ("64M", 64 * 10**6),
        ("64MB", 64 * 10**6),
        ("64 MB", 64 * 10**6),
        ("64Mi", 64 << 20),
        ("64MiB", 64 << 20),
        ("0.5GiB", 1 << 29),
    ],
)
def test_sizes_are_bytes(text: str, number: int) -> None:
    assert yaml_text.size(text) == number


@pytest.mark.parametrize("text", ["64B", "64 B", "64BB", "64MBB", "64e-1", "0.3", "-1", "MB"])
def test_invalid_sizes_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        yaml_text.size(text)


def test_every_value_has_a_line() -> None:
    _, lines = yaml_text.parse(
        "a: 1\n# a comment\nb:\n  c: [x,\n      y]\n\n  d:\n  - e: 2\n1K: z\n", source="it"
    )
    assert lines == {
        ("a",): 1,
        ("b",): 3,
        ("b", "c"): 4,
        ("b", "c", 0): 4,
        ("b", "c", 1): 5,
        ("b", "d"): 7,
        ("b", "d", 0): 8,
        ("b", "d", 0, "e"): 8,
        (1000,): 9,
    }


def test_anchors_and_merges_are_resolved() -> None:
    data, _ = yaml_text.parse("a: &x {n: 1, m: 2}\nb:\n  <<: *x\n  n: 3\n", source="it")
    assert data == {"a": {"n": 1, "m": 2}, "b": {"n": 3, "m": 2}}


def test_an_empty_file_is_an_empty_configuration() -> None:
    assert yaml_text.parse("", source="it") == ({}, {})
    assert yaml_text.parse("# nothing yet\n", source="it") == ({}, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: a: duplicate key, first on line 1"),
        ("b: {a: 1, a: 2}\n", "line 1: b.a: duplicate key"),
        ("a: &x\n- *x\n", "a.0: refers to itself"),
        ("a:\n  ? [1, 2]\n  : 3\n", "line 2: a: a key must be a single value"),
        ("a: 1\nb: \x00\n", "line 2: the character U+0000"),
        ("a: 1\nb: c: d\n", "line 2: not YAML: mapping values"),
        ("a: [1,\n", "not YAML"),
        ("a: 1\n---\nb: 2\n", "line 2: not YAML: but found another document"),
        ("- a\n", "line 1: expected `key: value`"),
        ("word\n", "line 1: expected `key: value`"),
        ("a: !!python/object/apply:os.getcwd []\n", "line 1: not YAML: could not determine"),
        ("a: !count many\n", "`many` is not a count"),
        ("a: " + "[" * 5000, "cannot be read"),
    ],
)
def test_invalid_yaml_is_an_error_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        yaml_text.parse(text, source="it.yaml")
    assert message in str(caught.value)
    assert "it.yaml" in str(caught.value)


def test_all_duplicate_keys_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        yaml_text.parse("a: 1\na: 2\nb: 1\nb: 2\n", source="it")
    assert [problem.path for problem in caught.value.problems] == ["a", "b"]


@given(st.text(max_size=40))
def test_any_text_is_data_or_a_config_error(text: str) -> None:
    try:
        data, _ = yaml_text.parse(text, source="it")
    except ConfigError:
        return
    assert isinstance(data, dict)
