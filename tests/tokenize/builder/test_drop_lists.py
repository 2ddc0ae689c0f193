"""Drop lists: which documents they name, how these are counted, and lists that are wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data.corpora import ONE, counts_of, ids_of, read_dataset, write_jsonl

from headrace.console.errors import InputError, SeveralErrors
from headrace.dataplane.datasets import manifest
from headrace.tokenize.neardup.find import NeardupConfig, find_neardups
from headrace.tokenize.sources.format import SourceConfig

Run = Callable[..., Path]
NAMED = SourceConfig(id_field="name")


@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_documents_are_dropped_by_their_ids(
    tmp_path: Path, corpus: Path, run_build: Run, ending: str
) -> None:
    whole = ids_of(run_build(corpus, source=NAMED, out="whole"))
    drops = [id for number, id in enumerate(whole) if number % 7 == 0 and id]
    path = tmp_path / f"drops.{ending}"
    entries = [*reversed(drops), "unknown"]
    if ending == "txt":
        path.write_text("\n".join(entries))
    elif ending == "jsonl":
        path.write_text("".join(json.dumps({"id": id, "why": 1}) + "\n" for id in entries))
    else:
        pq.write_table(pa.table({"score": [0] * len(entries), "id": entries}), path)
    out = run_build(corpus, source=NAMED, drop=(str(path),))
    assert ids_of(out) == [id for id in whole if id not in drops]
    assert counts_of(out)["dropped by the list"] == len(drops)
    assert counts_of(out)["documents read"] == len(whole)


def test_documents_are_dropped_by_input_and_record(
    tmp_path: Path, corpus: Path, run_build: Run
) -> None:
    whole = run_build(corpus, out="whole")
    table = manifest.load(str(whole)).generations[0].provenance["inputs"]["name"]
    hashes = {name: hash for name, _, hash in json.loads((whole / table).read_bytes())}
    kept = [(origin.file, origin.position) for origin, _, _ in read_dataset(whole)]
    drops = kept[3::5]
    path = tmp_path / "drops.parquet"
    rows = {"input": [hashes[file] for file, _ in drops], "record": [at for _, at in drops]}
    pq.write_table(pa.table(rows), path)
    out = run_build(corpus, drop=(str(path),))
    remaining = [(origin.file, origin.position) for origin, _, _ in read_dataset(out)]
    assert remaining == [place for place in kept if place not in drops]


def test_a_list_that_matches_nothing_is_an_error_with_counts(
    tmp_path: Path, corpus: Path, run_build: Run
) -> None:
    path = tmp_path / "drops.txt"
    path.write_text("one\ntwo\n")
    with pytest.raises(InputError, match="2 entries, 244 documents read") as caught:
        run_build(corpus, source=NAMED, drop=(str(path),))
    assert caught.value.where == str(path)
    with pytest.raises(InputError, match="has ids, but the documents have none") as caught:
        run_build(corpus, drop=(str(path),), out="other")
    assert "--id-field" in (caught.value.hint or "")
    assert not (tmp_path / "other").exists(), "it is known before anything is read"
    path = tmp_path / "drops.jsonl"
    path.write_text('{"input": "0000", "record": 3}\n')
    with pytest.raises(InputError, match="records of 1 input, 0 of them read here"):
        run_build(corpus, drop=(str(path),), out="third")


@pytest.mark.parametrize("last", ["there", "beyond the end"])
def test_a_record_that_is_not_in_its_input_is_an_error(
    tmp_path: Path, corpus: Path, run_build: Run, last: str
) -> None:
    """Records of other inputs are none: a list may be of more files than a build."""
    file = corpus / "1.jsonl"
    lines = len(file.read_bytes().splitlines())
    input = sha256(file.read_bytes()).hexdigest()
    rows = [(input, 0), (input, lines - (last == "there")), ("0" * 32, 7)]
    path = tmp_path / "drops.jsonl"
    path.write_text("".join(json.dumps({"input": i, "record": n}) + "\n" for i, n in rows))
    if last == "there":
        assert counts_of(run_build(corpus, drop=(str(path),)))["dropped by the list"] == 2
        return
    with pytest.raises(InputError, match="names 2 records of the inputs, and 1 of them are not"):
        run_build(corpus, drop=(str(path),))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n", "is empty"),
        ("a.jsonl", '{"name": 1}\n', "has the columns name"),
        ("a.jsonl", "[1]\n", "a line that is no JSON object"),
        ("a.parquet", "no", "or is not a Parquet file"),
    ],
)
def test_a_wrong_list_is_an_error(
    tmp_path: Path, corpus: Path, run_build: Run, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        run_build(corpus, source=NAMED, drop=(str(tmp_path / name),))


@pytest.mark.parametrize(
    ("lines", "number", "message"),
    [
        (['{"id": "a"}', '{"name": "b"}'], 2, "an entry without id"),
        (['{"id": "a"}', "", '{"id": null}'], 3, "an entry without id"),
        (['{"id": ["a"]}'], 1, r"the id \['a'\]"),
        (['{"input": "x", "record": -1}'], 1, "the record -1"),
        (['{"input": "x", "record": 1}', '{"input": "x"}'], 2, "the record None"),
        (['{"input": "x", "record": 1}', '{"input": "x", "record": "x"}'], 2, "the record 'x'"),
        (['{"input": "x", "record": true}'], 1, "the record True"),
        (['{"input": "x", "record": 9223372036854775808}'], 1, "the record 9223372036854775808"),
        (['{"record": 1}'], 1, "has the columns record"),
        (['{"id": "a"}', "[" * 100_000], 2, "no JSON object"),
    ],
)
def test_an_entry_that_cannot_be_read_is_named_by_its_line(
    tmp_path: Path, corpus: Path, run_build: Run, lines: list[str], number: int, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match=message) as caught:
        run_build(corpus, source=NAMED, drop=(str(path),))
    assert str(path) in caught.value.message
    assert caught.value.where == f"line {number}"


def test_a_null_of_a_parquet_list_is_named_by_its_row(
    tmp_path: Path, corpus: Path, run_build: Run
) -> None:
    pq.write_table(pa.table({"id": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="an entry without id") as caught:
        run_build(corpus, source=NAMED, drop=(str(tmp_path / "a.parquet"),))
    assert caught.value.where == "row 2"


def test_ids_are_numbers_or_texts(tmp_path: Path, run_build: Run) -> None:
    corpus = tmp_path / "corpus.jsonl"
    lines = [{"text": f"water {id}", "name": id} for id in (5, "doc-9", 7)]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    drops = tmp_path / "drops.jsonl"
    drops.write_text('{"id": 5}\n{"id": "doc-9"}\n')
    assert ids_of(run_build(corpus, source=NAMED, drop=(str(drops),))) == ["7"]


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_list(
    tmp_path: Path, run_build: Run, ending: str
) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    entries = ["a.jsonl#0", "a.jsonl#2"]
    if ending == "jsonl":
        entries = [json.dumps({"id": id}) for id in entries]
    path = tmp_path / f"drops.{ending}"
    path.write_bytes("\r\n".join(["\ufeff" + entries[0], *entries[1:]]).encode())
    assert ids_of(run_build(corpus, source=NAMED, drop=(str(path),))) == ["a.jsonl#1"]


def test_only_a_line_feed_ends_a_line(tmp_path: Path, run_build: Run) -> None:
    corpus = tmp_path / "corpus.jsonl"
    lines = [{"text": f"water {id}", "name": id} for id in ("a\u2028b", "b", "c")]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "drops.txt").write_text("a\u2028b\n", encoding="utf-8")
    out = run_build(corpus, source=NAMED, drop=(str(tmp_path / "drops.txt"),))
    assert ids_of(out) == ["b", "c"]


def test_a_text_that_is_not_utf_8_is_an_error(tmp_path: Path, corpus: Path, run_build: Run) -> None:
    path = tmp_path / "drops.txt"
    path.write_bytes(b"one\nt\xffo\n")
    with pytest.raises(InputError, match="is not UTF-8") as caught:
        run_build(corpus, source=NAMED, drop=(str(path),))
    assert caught.value.where == "line 2"


def test_a_damaged_parquet_list_is_an_error(tmp_path: Path, corpus: Path, run_build: Run) -> None:
    path = tmp_path / "drops.parquet"
    pq.write_table(pa.table({"input": ["0" * 32] * 9, "record": list(range(9))}), path)
    whole = path.read_bytes()
    for at in (4, 20, 60, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:at] + b"\xff\xff\xff\xff" + whole[at + 4 :])
        with pytest.raises(InputError) as caught:
            run_build(corpus, drop=(str(path),))
        assert f"the drop list {path}" in caught.value.message


def test_each_list_that_matches_nothing_is_named(
    tmp_path: Path, corpus: Path, run_build: Run
) -> None:
    lists = {"one": "0.jsonl#3\n", "two": "no\nnone\n", "three": "nothing\n"}
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match="2 entries, 244 documents read") as caught:
        run_build(corpus, source=NAMED, drop=(str(tmp_path / "one"), str(tmp_path / "two")))
    assert caught.value.where == str(tmp_path / "two")
    with pytest.raises(SeveralErrors) as both:
        run_build(corpus, source=NAMED, drop=tuple(str(tmp_path / name) for name in lists))
    assert [error.where for error in both.value.errors] == [
        str(tmp_path / "two"),
        str(tmp_path / "three"),
    ]


def test_documents_are_counted_for_each_list(
    tmp_path: Path, corpus: Path, run_build: Run, caplog: pytest.LogCaptureFixture
) -> None:
    first_list, second_list = tmp_path / "one", tmp_path / "two"
    first_list.write_text("0.jsonl#3\n0.jsonl#5\nunknown\n")
    second_list.write_text("0.jsonl#5\n1.jsonl#0\n")
    with caplog.at_level(logging.INFO):
        out = run_build(corpus, source=NAMED, drop=(str(first_list), str(second_list)))
    assert f"drop list {first_list}: 3 entries, 2 documents dropped" in caplog.text
    counts = counts_of(out)
    assert counts["dropped by the list"] == 3
    assert (
        counts[f"named by the list {first_list}"] == counts[f"named by the list {second_list}"] == 2
    )
    assert counts["documents read"] == 244


def test_a_killed_build_resumes_with_a_list_of_another_name(
    tmp_path: Path, corpus: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("0.jsonl#3\n")
    second.write_text("0.jsonl#3\n")
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_build(corpus, source=NAMED, drop=(str(first),))
    out = run_build(corpus, source=NAMED, drop=(str(second),))
    assert "0.jsonl#3" not in ids_of(out)


def test_an_input_may_be_named_by_its_whole_sha256(tmp_path: Path, run_build: Run) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    whole = sha256(corpus.read_bytes()).hexdigest()
    drops = {"long": whole, "short": whole[:32]}
    for name, input in drops.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"input": [input, input], "record": [2, 0]}), path)
        out = run_build(corpus, source=NAMED, drop=(str(path),), out=name)
        assert ids_of(out) == ["a.jsonl#1"]


def test_a_parquet_list_without_rows_is_a_list(
    tmp_path: Path, corpus: Path, run_build: Run, caplog: pytest.LogCaptureFixture
) -> None:
    path, kinds = tmp_path / "drops.parquet", {"input": pa.string(), "record": pa.int64()}
    pq.write_table(pa.table({name: pa.array([], kind) for name, kind in kinds.items()}), path)
    with caplog.at_level(logging.INFO):
        out = run_build(corpus, source=NAMED, drop=(str(path),))
    assert len(ids_of(out)) == 244
    assert f"drop list {path}: 0 entries, 0 documents dropped" in caplog.text


def test_a_build_takes_the_list_of_a_search_that_found_nothing(
    tmp_path: Path, run_build: Run
) -> None:
    pytest.importorskip("rensa")
    corpus = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    out = str(tmp_path / "drop.parquet")
    result = find_neardups(NeardupConfig(inputs=(str(corpus),), out=out, engine=ONE))
    assert result.duplicates == 0
    assert len(read_dataset(run_build(corpus, drop=(out,)))) == 3
