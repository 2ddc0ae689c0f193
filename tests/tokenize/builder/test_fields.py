"""Kept fields: each document brings its own values to the dataset, whatever the build does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data.corpora import (
    documents_with_fields,
    keep,
    snapshot,
    texts,
    write_jsonl,
    write_lines,
)

from headrace.console.errors import InputError, MisuseError, StorageError
from headrace.dataplane.datasets import fields, manifest
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.datasets.fields import fields_file
from headrace.tokenize.builder.build import BuildConfig
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.sources.format import SourceConfig
from headrace.tokenize.verify import verify

Run = Callable[..., Path]
LANGUAGES = ("en", "de", None, "日本")


def records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return documents with fields that follow from their text, so that a test can tell them."""
    return [
        {
            "text": text,
            "score": number / 4 if number % 3 else number,
            "metadata": {"language": LANGUAGES[number % 4]},
            "good": number % 2 == 0,
            "words": len(text.split()),
        }
        for number, text in enumerate(texts(count, seed=seed))
    ]


KEEP = keep("metadata.language", "score", "good", "words")


def expected(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata.language": record["metadata"]["language"],
        "score": float(record["score"]),
        "good": record["good"],
        "words": record["words"],
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": 3},
        {"format": "mds", "compression": "zstd"},
        {"dedup": "exact", "shuffle": 1},
    ],
    ids=str,
)
def test_every_document_has_its_own_fields(
    tmp_path: Path, run_build: Run, options: dict[str, Any]
) -> None:
    lines = records(300)
    write_lines(tmp_path / "c" / "a.jsonl", lines[:200])
    write_lines(tmp_path / "c" / "b.jsonl", [*lines[200:], lines[0]])
    out = run_build(tmp_path / "c", source=KEEP, **options)
    by_text = {line["text"]: expected(line) for line in lines}
    pairs = documents_with_fields(out)
    assert len(pairs) == 300 + ("dedup" not in options)
    assert all(by_text[text] == row for text, row in pairs)
    held = manifest.load(str(out))
    assert held.kept_fields == {
        "metadata.language": "string",
        "score": "float",
        "good": "bool",
        "words": "int",
    }
    assert held.generations[0].provenance["counts"]["documents without metadata.language"] == 75
    if options.get("format") != "mds":  # importing StreamingDataset takes seconds
        assert verify(str(out)) == []


def test_pieces_of_a_document_have_its_fields(tmp_path: Path, run_build: Run) -> None:
    lines = records(20)
    write_lines(tmp_path / "c" / "a.jsonl", lines)
    out = run_build(tmp_path / "c", source=KEEP, shuffle=1, max_document_tokens=100)
    pairs = documents_with_fields(out)
    assert len(pairs) > 20
    for text, row in pairs:
        whole = text.strip("\ufffd")  # a character may be cut in two
        assert row in [expected(line) for line in lines if whole in line["text"]]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_give_the_same_fields_as_json_lines(
    tmp_path: Path, run_build: Run, ending: str
) -> None:
    lines = records(120)
    path = tmp_path / f"a.{ending}"
    table = pa.Table.from_pylist(lines)
    if ending == "parquet":
        pq.write_table(table, path, row_group_size=30)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    of_lines = run_build(write_lines(tmp_path / "a.jsonl", lines), source=KEEP, out="lines")
    assert documents_with_fields(run_build(path, source=KEEP)) == documents_with_fields(of_lines)


def test_values_of_csv_have_the_types_that_are_named(tmp_path: Path, run_build: Run) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,n,x,good\na,1,0.5,true\nb,,,\nc,two,1,false\n")
    out = run_build(path, source=keep("n"))
    assert [row for _, row in documents_with_fields(out)] == [{"n": "1"}, {"n": None}, {"n": "two"}]
    source = keep("n:int", "x:float", "good:bool")
    with pytest.raises(InputError, match="`n` is 'two', not int") as caught:
        run_build(path, source=source, out="wrong")
    assert caught.value.where == f"{path}, row 3"
    out = run_build(path, source=source, on_error="skip", out="typed")
    assert [row for _, row in documents_with_fields(out)] == [
        {"n": 1, "x": 0.5, "good": True},
        {"n": None, "x": None, "good": None},
    ]


def test_a_killed_or_parallel_build_has_the_same_bytes(tmp_path: Path, run_build: Run) -> None:
    write_lines(tmp_path / "c" / "a.jsonl", records(200))
    whole = snapshot(run_build(tmp_path / "c", source=KEEP, shuffle=2))
    again = run_build(tmp_path / "c", source=KEEP, shuffle=2, out="again", engine=TWO)
    assert snapshot(again) == whole
    for name in [name for name in whole if name.startswith("fields/")][:2]:
        (again / name).unlink()
    run_build(tmp_path / "c", source=KEEP, shuffle=2, out="again")
    assert snapshot(again) == whole


TWO = ExecutorConfig(workers=2)


def test_a_damaged_file_of_fields_is_found(tmp_path: Path, run_build: Run) -> None:
    out = run_build(write_lines(tmp_path / "a.jsonl", records(50)), source=KEEP)
    shard = next(iter(Dataset(str(out)).shards))
    file = fields_file(shard)
    assert file is not None
    path = out / file.name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (damage,) = verify(str(out))
    assert damage.name == file.name
    assert "do not match their hash" in damage.what


def test_added_files_keep_the_types_of_the_dataset(tmp_path: Path, run_build: Run) -> None:
    write_lines(tmp_path / "c" / "b.jsonl", records(20))
    out = run_build(tmp_path / "c", source=KEEP)
    write_lines(tmp_path / "c" / "a.jsonl", [{**line, "score": 1} for line in records(20, seed=5)])
    run_build(tmp_path / "c", source=KEEP)
    assert manifest.load(str(out)).kept_fields["score"] == "float"
    assert documents_with_fields(out)[-1][1]["score"] == 1.0
    with pytest.raises(StorageError, match=r"keep was metadata\.language:string,score:float"):
        run_build(tmp_path / "c", source=keep("score"))


@pytest.mark.parametrize(
    ("value", "type", "message"),
    [
        ("high", "float", "`score` is a JSON string, not float"),
        (True, "int", "`score` is a JSON bool, not int"),
        (0.5, "int", "`score` is a JSON float, not int"),
        (1 << 63, "int", "`score` is an int of more than 64 bits"),
        ([1], "string", "`score` is a JSON list<int>, not string"),
        (json.loads("[" * 500 + "]" * 500), "int", "`score` is a JSON list<list>, not int"),
        ("a", "list<string>", "`score` is a JSON string, not list<string>"),
        (["a", 1], "list<string>", r"`score\[1\]` is a JSON int, not string"),
        ([1 << 63], "list<int>", r"`score\[0\]` is an int of more than 64 bits"),
        ("\ud800", "string", "half of a surrogate pair in `score`"),
        (..., "float", "no field `score`"),
    ],
)
def test_a_field_of_another_type_is_a_bad_record(
    tmp_path: Path, run_build: Run, value: Any, type: str, message: str
) -> None:
    good: dict[str, Any] = {"int": 1, "float": 0.5, "string": "x"}
    good |= {f"list<{name}>": [value] for name, value in good.items()}
    lines: list[dict[str, Any]] = [{"text": f"a {k}", "score": good[type]} for k in range(4)]
    del lines[2]["score"]
    if value is not ...:
        lines[2]["score"] = value
    path = write_lines(tmp_path / "a.jsonl", lines)
    with pytest.raises(InputError, match=message) as caught:
        run_build(path, source=keep(f"score:{type}"))
    assert caught.value.where == f"{path}, line 3"
    out = run_build(path, source=keep(f"score:{type}"), on_error="skip", out="skipped")
    result = manifest.load(str(out)).generations[0]
    assert result.documents == 3
    assert (
        sum(n for name, n in result.provenance["counts"].items() if name.startswith("bad: ")) == 1
    )
    assert re.search(message, result.provenance["problems"][0])


def test_wrong_columns_are_named(tmp_path: Path, run_build: Run) -> None:
    path = tmp_path / "a.parquet"
    wide = pa.array([1, 1 << 63], pa.uint64())
    pq.write_table(pa.table({"text": ["a", "b"], "n": wide, "l": [[[1]], [[2]]]}), path)
    with pytest.raises(InputError, match=r"column `n` holds uint64 \(int\), not string"):
        run_build(path, source=keep("n:string"))
    with pytest.raises(InputError, match="no column `m`"):
        run_build(path, source=keep("m:string"))
    with pytest.raises(InputError, match="`n` is an int of more than 64 bits") as caught:
        run_build(path, source=keep("n"))
    assert caught.value.where == f"{path}, row 2"
    with pytest.raises(
        InputError, match=r"`l` holds list<.*string, int, float, bool, list<string>"
    ):
        run_build(path, source=keep("l"))


def test_a_field_without_values_or_with_several_types_needs_a_type(
    tmp_path: Path, run_build: Run
) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", [{"text": "a", "x": None, "y": 1}, {"text": "b", "y": "1"}]
    )
    with pytest.raises(InputError, match="no value for the field `x` in the first records of 1"):
        run_build(path, source=keep("x"))
    with pytest.raises(InputError, match="`y` has values of several types: int, string"):
        run_build(path, source=keep("y"))


def test_a_block_without_documents_has_no_fields(tmp_path: Path, run_build: Run) -> None:
    write_lines(tmp_path / "c" / "a.jsonl", [{"text": "", "x": 1}] * 3)
    write_lines(tmp_path / "c" / "b.jsonl", [{"text": "b", "x": 2}])
    table = pa.table({"text": pa.array([None, None], pa.string()), "x": [1, 2]})
    pq.write_table(table, tmp_path / "c" / "c.parquet")
    out = run_build(tmp_path / "c", source=keep("x"), on_error="skip")
    assert documents_with_fields(out) == [("b", {"x": 2})]


def test_fields_need_an_input_that_has_some(tmp_path: Path, run_build: Run) -> None:
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(MisuseError, match="--keep is for jsonl, parquet, arrow, csv"):
        run_build(tmp_path / "a.txt", source=keep("x:int"))
    path = write_jsonl(tmp_path / "b.jsonl", ["other"])
    out = run_build(tmp_path / "a.txt", path, source=keep("name"))
    assert documents_with_fields(out) == [
        ("some text", {"name": None}),
        ("other", {"name": "b.jsonl#0"}),
    ]


@pytest.mark.parametrize("names", [("tokens",), ("a", "a"), ("",)])
def test_names_that_mean_something_else_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="keep"):
        BuildConfig(inputs=("x",), out="y", tokenizer="byte", source=keep(*names))


def test_a_few_documents_are_read_without_the_rest(tmp_path: Path) -> None:
    count = 10 * fields.BATCH_ROWS
    table = pa.table({"url": [f"https://example.org/{k}/{'x' * 200}" for k in range(count)]})
    entry = fields.write(str(tmp_path), "fields", table)
    shard = manifest.Shard(
        name="", size=0, documents=count, tokens=0, hash="", chunks=b"", details={"fields": entry}
    )
    file = fields_file(shard)
    assert file is not None
    reader = fields.FieldsReader(str(tmp_path), file)
    first = 2 * fields.BATCH_ROWS - 10
    assert reader.rows(first, first + 20) == table.slice(first, 20)
    read = len(reader._source._chunks) * (1 << 18)
    assert read < file.size / 3


def test_a_missing_field_is_blamed_on_the_option_that_wants_it(
    tmp_path: Path, run_build: Run
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "water", "url": "a"}, {"text": "water"}])
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["water"], "score": [1.5]}), table)
    for path, source in (
        (lines, keep("url")),
        (table, keep("url:int")),
    ):
        with pytest.raises(InputError) as caught:
            run_build(path, source=source)
        assert "--keep NAME:TYPE" in str(caught.value.hint)
        assert "--keep 'NAME:TYPE?'" in str(caught.value.hint)
        assert "--text-field" not in str(caught.value.hint)
    with pytest.raises(InputError, match="no field `body`") as caught:
        run_build(lines, source=SourceConfig(text_field="body", keep=keep("url").keep))
    assert "--text-field" in str(caught.value.hint)
