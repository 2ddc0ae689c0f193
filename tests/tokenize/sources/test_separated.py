"""CSV and TSV: Python's and pandas' files read as they were written, and every kind of bad row."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.corpora import read_file, small_blocks

from headrace.tokenize.corpus.field_types import resolve_types
from headrace.tokenize.corpus.inputs import find_files
from headrace.tokenize.sources.fields import KeptField
from headrace.tokenize.sources.format import ReadLimits, SourceConfig

VALUES = st.text(
    st.one_of(st.sampled_from("\",\n\r\t' é水"), st.characters(blacklist_categories=("Cs",))),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(VALUES, VALUES, VALUES), max_size=12), block=st.integers(1, 40))
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_written_table_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, ending: str, rows: list[tuple[str, ...]], block: int
) -> None:
    path = tmp_path_factory.mktemp("tables") / f"a.{ending}"
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter="\t" if ending == "tsv" else ",", quoting=csv.QUOTE_ALL)
    writer.writerows([("id", "text", "note"), *rows])
    path.write_bytes(out.getvalue().encode())
    with small_blocks(block):  # lines end anywhere in a block
        result, problems = read_file(path, limits=ReadLimits(block_bytes=block), id_field="id")
    assert not problems
    assert result == [(k, text, id or None) for k, (id, text, _) in enumerate(rows)]


def test_a_table_of_pandas(tmp_path: Path) -> None:
    frame = pd.DataFrame({"n": [1, 2, 3], "text": ['say "a",\nand b', "plain", "水 🙂"]})
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_csv(tmp_path / "b.tsv.gz", sep="\t", index=False)
    frame.to_csv(tmp_path / "c.csv", index=False, encoding="utf-8-sig", lineterminator="\r\n")
    for name in ("a.csv", "b.tsv.gz", "c.csv"):
        result, problems = read_file(tmp_path / name)
        assert not problems
        assert [text for _, text, _ in result] == list(frame["text"])


@pytest.mark.parametrize("separator", [";", "|", "\t", ","])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_the_separator_is_the_one_that_gives_the_columns(
    tmp_path: Path, separator: str, ending: str
) -> None:
    path = tmp_path / f"a.{ending}"
    rows = [["id", "text", "n"], ["1", f'a{separator}"b",\nc;|', "2"]]
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    keep = (KeptField(name="n", type="int"),)
    result, problems = read_file(path, id_field="id", keep=keep)
    assert (result, problems) == ([(0, rows[1][1], "1")], [])
    config = SourceConfig(keep=(KeptField(name="n"),))
    assert resolve_types(config, find_files([str(path)], config), {}).keep[0].type == "string"


def test_the_usual_separator_is_kept_where_it_gives_the_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,a;b;c;d\nwater,1;2;3\n")
    assert read_file(tmp_path / "a.csv") == ([(0, "water", None)], [])


def test_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        b'id,text\n1,good\n2,too,many\n\n3\n4,\xff\n5,\xc3\xa9\n6,"a"b\n7,last\n8,"open'
    )
    result, problems = read_file(tmp_path / "a.csv", id_field="id")
    assert [(number, text) for number, text, _ in result] == [(0, "good"), (4, "é"), (6, "last")]
    assert [(p.kind, p.position) for p in problems] == [
        ("broken CSV", 1),
        ("broken CSV", 2),
        ("invalid UTF-8", 3),
        ("broken CSV", 5),
        ("broken CSV", 7),
    ]
    assert problems[0].where().endswith("a.csv, row 2")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"body,n\na,1\n", "no column `text` (it has body, n)"),
        (b"text,text\na,b\n", "2 columns of the name `text`"),
        (b"body;n\na;1\n", "no column `text` (it has body, n)"),
    ],
)
def test_other_columns(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    result, (problem,) = read_file(tmp_path / "a.csv")
    assert not result
    assert problem.kind == "other schema"
    assert message in problem.message


def test_limits_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"text\n{'é' * 51}\nfine\n{'x' * 101}\nlast\n")
    result, problems = read_file(path, limits=ReadLimits(document_bytes=100))
    assert [text for _, text, _ in result] == ["fine", "last"]
    assert [(p.kind, p.position) for p in problems] == [("too large", 0), ("too large", 2)]
    cut = gzip.compress(b"text\n" + b"\n".join(b"row %d" % k for k in range(5000)))
    (tmp_path / "b.csv.gz").write_bytes(cut[:-2000])
    result, problems = read_file(tmp_path / "b.csv.gz")
    assert [problem.kind for problem in problems] == ["damaged file"]
    assert [text for _, text, _ in result] == [f"row {k}" for k in range(len(result))]
    (tmp_path / "empty.csv").write_bytes(b"")
    assert read_file(tmp_path / "empty.csv") == ([], [])
