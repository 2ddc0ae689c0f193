"""Comparisons of numbers in expressions, against Python, which compares whole numbers with floats
exactly."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.tokenize.views.select import evaluate
from headrace.tokenize.views.where import Where, parse

KINDS = {"n": "int", "m": "int", "x": "float", "y": "float"}
SCHEMA = pa.schema([("n", pa.int64()), ("m", pa.int64()), ("x", pa.float64()), ("y", pa.float64())])

EDGES = (0, 3, 1 << 24, 1 << 53, 1_700_000_000, (1 << 63) - 1024, 1 << 63)
"""Whole numbers near which a type of floats loses digits, or 64 bits end."""


def numbers_near(edge: int) -> st.SearchStrategy[int]:
    signed = st.integers(-3, 3).flatmap(lambda step: st.sampled_from([edge + step, -edge - step]))
    return signed.filter(lambda number: -(1 << 63) <= number < 1 << 63)


INTS = st.one_of(
    st.sampled_from(EDGES).flatmap(numbers_near), st.integers(-(1 << 63), (1 << 63) - 1)
)
FLOATS = st.one_of(
    INTS.map(float),
    INTS.map(lambda number: math.nextafter(float(number), math.inf)),
    st.sampled_from([0.0, -0.0, 0.5, -2.5, 1e300, math.inf, -math.inf]),
    st.floats(allow_nan=False),
)
ROWS = st.fixed_dictionaries({"n": INTS, "m": INTS, "x": FLOATS | st.just(math.nan), "y": FLOATS})
OPERATORS = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
NAMES = st.sampled_from(list(KINDS))


def literal(number: float) -> str:
    if isinstance(number, float) and math.isinf(number):
        return "1e999" if number > 0 else "-1e999"
    return repr(number)


LITERALS = st.one_of(INTS, FLOATS).map(literal)
COMPARISONS = st.one_of(
    st.tuples(NAMES, OPERATORS, LITERALS).map(" ".join),
    st.tuples(LITERALS, OPERATORS, NAMES).map(" ".join),
    st.tuples(NAMES, OPERATORS, NAMES).map(" ".join),
    st.tuples(LITERALS, OPERATORS, NAMES, OPERATORS, NAMES).map(" ".join),
    st.tuples(NAMES, st.sampled_from(["in", "not in"]), st.lists(LITERALS, min_size=1)).map(
        lambda parts: f"{parts[0]} {parts[1]} ({', '.join(parts[2])},)"
    ),
)


def chosen(where: Where, rows: list[dict[str, Any]]) -> list[bool]:
    choice: list[bool] = evaluate(pa.Table.from_pylist(rows, schema=SCHEMA), where).tolist()
    return choice


@given(rows=st.lists(ROWS, min_size=1, max_size=8), text=COMPARISONS, data=st.data())
def test_numbers_are_compared_as_python_does(
    rows: list[dict[str, Any]], text: str, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):  # a row that has the literal's own value
        row = data.draw(st.sampled_from(rows))
        row["n"] = data.draw(INTS)
        row["x"] = float(row["n"])
    expected = [bool(eval(text, {}, dict(row))) for row in rows]
    assert chosen(parse(text, KINDS), rows) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("n >= 1.7e9", 1_700_000_001),
        ("n > 0.5", (1 << 24) + 1),
        ("n in (1.0, 5)", 5),
        ("n != 3.0", (1 << 53) + 1),
        ("n == 9007199254740992.0", 1 << 53),
        ("x in (0.0,)", -0.0),
        ("x in (-0.0,)", 0.0),
        ("n > x", (1 << 53) + 1),
    ],
)
def test_whole_numbers_beyond_a_float_are_compared_with_it(text: str, number: float) -> None:
    rows = [
        {"n": int(number), "m": 0, "x": 0.0 if "n" in text else number, "y": 0.0},
        {"n": None, "m": None, "x": None, "y": None},
        {"n": (1 << 53) + 1, "m": 0, "x": 1.0, "y": 0.0},
    ]
    first, null, _ = chosen(parse(text, KINDS), rows)
    assert (first, null) == (True, False)
    assert chosen(parse(f"not ({text})", KINDS), rows)[:2] == [False, False]


def test_pyarrow_alone_cannot_compare_them() -> None:
    """The control of the tests above: without them, its own cast would do."""
    where = Where("n >= 1.7e9", pc.field("n") >= pc.scalar(1.7e9), frozenset({"n"}))
    with pytest.raises(pa.ArrowInvalid, match="not in range"):
        chosen(where, [{"n": 1_700_000_001, "m": 0, "x": 0.0, "y": 0.0}])
