"""Parquet and Arrow: rows as documents, other schemas, damaged files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data.corpora import read_file, texts

from headrace.console.errors import InputError
from headrace.tokenize import sources
from headrace.tokenize.corpus.inputs import find_files
from headrace.tokenize.sources import corpus_format
from headrace.tokenize.sources.format import ReadLimits, SourceConfig


def test_parquet_and_arrow(tmp_path: Path) -> None:
    documents = texts(500)
    table = pa.table({"n": range(500), "text": documents, "id": [f"d{k}" for k in range(500)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=64)
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as w:
        w.write_table(table, max_chunksize=64)
    with pa.ipc.new_stream(str(tmp_path / "s.arrow"), table.schema) as w:
        w.write_table(table, max_chunksize=64)
    large = table.set_column(1, "text", table["text"].cast(pa.large_string()))
    pq.write_table(large, tmp_path / "l.parquet")
    words = table.set_column(1, "text", table["text"].dictionary_encode())
    pq.write_table(words, tmp_path / "d.parquet")
    expected = [(k, text, f"d{k}") for k, text in enumerate(documents)]
    for name in ("a.parquet", "a.arrow", "s.arrow", "l.parquet", "d.parquet"):
        for size in (1 << 30, 3000):
            assert read_file(tmp_path / name, size=size, id_field="id") == (expected, []), name


def test_files_with_another_schema(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": ["a", None, "c"]}), tmp_path / "c.parquet")
    assert [p.kind for p in read_file(tmp_path / "a.parquet")[1]] == ["other schema"]
    assert "holds int64" in read_file(tmp_path / "b.parquet")[1][0].message
    result, problems = read_file(tmp_path / "c.parquet")
    assert [text for _, text, _ in result] == ["a", "c"]
    assert problems[0].where().endswith("c.parquet, row 2")


def test_another_schema_is_reported_once_per_file(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"])
    numbers = pa.table({"text": range(2000)})
    for name, table, message in (
        ("twice", twice, "2 columns of the name `text`"),
        ("numbers", numbers, "holds int64"),
        ("lists", pa.table({"text": [["a"], ["b"]]}), "holds list<"),
    ):
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=100)
        with pa.ipc.new_file(str(tmp_path / f"{name}.arrow"), table.schema) as out:
            out.write_table(table, max_chunksize=100)
        for ending in ("parquet", "arrow"):
            result, problems = read_file(tmp_path / f"{name}.{ending}", size=500)
            assert not result
            assert [problem.kind for problem in problems] == ["other schema"]
            assert message in problems[0].message


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_file_is_an_error_or_left_out(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"PAR1 ARROW1 but no more")
    with pytest.raises(InputError, match=r"this is not an? (Parquet|Arrow) file") as caught:
        read_file(path)
    assert caught.value.where == str(path)
    config = SourceConfig()
    (file,) = find_files([str(path)], config)
    (part,) = sources.cut(file, config, 1 << 20, skip_bad=True)
    (texts_,) = corpus_format(file.format).read(part, config)
    assert [(problem.kind, problem.file) for problem in texts_.problems] == [
        ("damaged file", str(path))
    ]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_few_rows_become_strings_at_once(tmp_path: Path, name: str) -> None:
    """A batch may have any number of rows; a row that is too large never becomes a string."""
    limits = ReadLimits(block_bytes=500, document_bytes=3000)
    documents = ["é" * size for size in (10, 100, 1500, 240, 10, 1501, 10, 400)]
    documents += ["x"] * 300  # Parquet reads few rows at once where the mean row is long
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        table = pa.table({"text": pa.array(documents, kind)})
        if name == "a.parquet":
            pq.write_table(table, tmp_path / name)
        else:
            with pa.ipc.new_file(str(tmp_path / name), table.schema) as out:
                out.write_table(table)
        config = SourceConfig(split_large=True)
        (file,) = find_files([str(tmp_path / name)], config)
        (part,) = corpus_format(file.format).cut(file, config, 1 << 20)
        blocks = list(corpus_format(file.format).read(part, config, limits))
        sizes = [[len(text.encode()) for text in block.texts if text != "x"] for block in blocks]
        assert [size for size in sizes if size] == [[20, 200], [3000], [480, 20], [20], [800]]
        (problem,) = (problem for block in blocks for problem in block.problems)
        assert (problem.kind, problem.position) == ("too large", 5)
