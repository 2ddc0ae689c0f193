"""Expressions over documents, against Python's own evaluation of the same text."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest

from headrace.console.errors import MisuseError
from headrace.tokenize.views.select import evaluate
from headrace.tokenize.views.where import parse

KINDS: Any = {
    "language": "string",
    "score": "float",
    "words": "int",
    "good": "bool",
    "m.x": "int",
    "tags": "list<string>",
    "years": "list<int>",
}
ROWS = [
    {
        "language": a,
        "score": b,
        "words": c,
        "good": d,
        "m.x": c,
        "tokens": 3,
        "tags": [a, None, "x"] if d else [],
        "years": [(1 << 53) + c, c],
    }
    for a, b, c, d in itertools.product(
        ("en", "de", "english"), (0.0, 0.5, 0.8), (-1, 0, 5), (True, False)
    )
]
SCHEMA = pa.schema(
    [
        ("language", pa.string()),
        ("score", pa.float64()),
        ("words", pa.int64()),
        ("good", pa.bool_()),
        ("m.x", pa.int64()),
        ("tokens", pa.int64()),
        ("tags", pa.list_(pa.string())),
        ("years", pa.list_(pa.int64())),
    ]
)


def chosen(text: str, rows: list[dict[str, Any]]) -> list[bool]:
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    result: list[bool] = evaluate(table, parse(text, KINDS)).tolist()
    return result


@pytest.mark.parametrize(
    "text",
    [
        "language == 'en' and score >= 0.8",
        "language != 'en' or not good",
        "0.5 <= score < 0.8",
        "'en' == language",
        "0.5 < score",
        "score > words",
        "words == 0.0",
        "words in (0, 5)",
        "words in (0, 0.5)",
        "score in [0, 0.5]",
        "language not in {'en', 'de'}",
        "good in (True,)",
        "'en' in language",
        "'en' not in language",
        "words == -1",
        "good",
        "not good and words < 5",
        "good == True",
        "(language == 'en' or language == 'de') and not (words > 0 and good)",
        "tokens >= 3",
        "'en' in tags",
        "'x' not in tags or 'de' in tags and 5 in years",
        "9007199254740992.0 in years",
    ],
)
def test_an_expression_chooses_what_python_would(text: str) -> None:
    expected = [bool(eval(text, {}, dict(row))) for row in ROWS]
    assert chosen(text, ROWS) == expected
    assert sum(expected) > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("language == 'en'", False),
        ("language != 'en'", False),
        ("not language == 'en'", False),
        ("language in ('en',)", False),
        ("language not in ('en',)", False),
        ("language is None", True),
        ("language is not None", False),
        ("language == 'en' or words == 5", True),
        ("language == 'en' and words == 5", False),
        ("good", False),
        ("not good", False),
        ("'x' in tags", False),
        ("'x' not in tags", False),
        ("tags is None", True),
    ],
)
def test_null_is_neither_true_nor_false(text: str, expected: bool) -> None:
    row = {**ROWS[0], "language": None, "good": None, "words": 5, "tags": None}
    assert chosen(text, [row]) == [expected]


def test_a_dot_leads_into_nested_fields() -> None:
    assert chosen("m.x == 5", ROWS) == [row["m.x"] == 5 for row in ROWS]


@pytest.mark.parametrize(("text", "place"), [("score >= ", 10), ("score ) 3", 7)])
def test_the_place_of_a_syntax_error_is_within_the_text_or_at_its_end(
    text: str, place: int
) -> None:
    with pytest.raises(MisuseError) as caught:
        parse(text, KINDS)
    assert f"character {place} of" in str(caught.value.where)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("language ==", "cannot be read"),
        ("", "cannot be read"),
        ("lang == 'en'", "no field `lang`"),
        ("language == 5", "`language` is of type string, and 5 of type int"),
        ("score == '0.5'", "`score` is of type float, and '0.5' of type string"),
        ("good == 1", "`good` is of type bool, and 1 of type int"),
        ("good < True", "which has no order"),
        ("language < score", "and `score` of type float"),
        ("words in ('a', 1)", "and 'a' of type string"),
        ("words in ()", "the list is empty"),
        ("language in score", "`in` needs a list"),
        ("language == None", "`language is None`"),
        ("1 == 1", "it compares no field"),
        ("language", "neither a comparison nor a field of type bool"),
        ("words + 1 == 2", "an expression has names"),
        ("__import__('os').system('true') == 0", "an expression has names"),
        ("(lambda: good)()", "neither|an expression has names"),
        ("language.upper() == 'EN'", "an expression has names"),
        ("words == 99999999999999999999", "more than 64 bits"),
        ("tags == 'en'", "`tags` is of type list<string>; ask for a value `in tags`"),
        ("tags in ('en',)", "ask for a value `in tags`"),
        ("tags == tags", "ask for a value `in tags`"),
        ("5 in tags", "`tags` is of type string, and 5 of type int"),
        ("words in years", "a literal must stand before"),
    ],
)
def test_a_wrong_expression_is_an_error_that_names_the_place(text: str, message: str) -> None:
    with pytest.raises(MisuseError, match=message) as caught:
        parse(text, KINDS)
    assert caught.value.where is not None
    assert caught.value.where.endswith(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("language = 'a AND b' AND words>3", "language == 'a AND b' and words>3"),
        ("score <> 3 OR NOT good", "score != 3 or not good"),
        ("!good&&words=1 || words<=2", "not good and words==1 or words<=2"),
        ("words IN (1, 2)", "words in (1, 2)"),
        ("language IS NOT NULL", "language is not None"),
        ("language == null", "language is None"),
        ("good == true", "good == True"),
    ],
)
def test_words_of_other_languages_are_named_in_the_hint(text: str, meant: str) -> None:
    with pytest.raises(MisuseError) as caught:
        parse(text, KINDS)
    assert caught.value.hint == f"write it as: {meant}"
    parse(meant, KINDS)


@pytest.mark.parametrize(
    "text",
    [
        "not " * 2_000 + "good",
        "score > " + "-" * 2_000 + "1",
        "good" + ".x" * 2_000,
        "good or " * 30_000 + "good",
        "0 < words < " * 30_000 + "words",
    ],
)
def test_an_expression_that_would_exhaust_the_stack_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(MisuseError) as caught:
        parse(text, KINDS)
    assert text[:60] in str(caught.value.where)


def test_levels_and_lists_that_people_write_are_read() -> None:
    text = "not " * 40 + "good"
    assert chosen(text, ROWS) == [row["good"] for row in ROWS]
    text = " or ".join(f"words == {k}" for k in range(5, 900))
    assert chosen(text, ROWS) == [row["words"] == 5 for row in ROWS]
    text = f"words in {tuple(range(5, 30_000))}"
    assert chosen(text, ROWS) == [row["words"] == 5 for row in ROWS]
