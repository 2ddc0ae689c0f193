"""Reading corpora: every format, sliced anywhere, and every kind of bad record."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.corpora import Records, read_file, small_blocks, texts

from headrace.tokenize.corpus.inputs import find_files
from headrace.tokenize.sources import corpus_format, delimited
from headrace.tokenize.sources.format import ReadLimits, SourceConfig


def plain(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("ending", PACKINGS)
def test_jsonl(tmp_path: Path, ending: str) -> None:
    documents = texts(50)
    lines = [json.dumps({"body": text, "id": number}) for number, text in enumerate(documents)]
    data = "\n".join([*lines[:20], "", *lines[20:]]).encode()
    path = plain(tmp_path / f"a.jsonl{ending}", PACKINGS[ending](data))
    result, problems = read_file(path, text_field="body", id_field="id")
    assert not problems
    lines_of = [*range(20), *range(21, 51)]
    assert result == list(zip(lines_of, documents, map(str, range(50)), strict=True))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_of_several_members(tmp_path: Path, ending: str) -> None:
    parts = [f"{number}\n".encode() * 1000 for number in range(5)]
    path = plain(tmp_path / f"a.txt{ending}", b"".join(map(PACKINGS[ending], parts)))
    result, problems = read_file(path, text_documents="line")
    assert not problems
    assert [text for _, text, _ in result] == [line for p in parts for line in p.decode().split()]


@pytest.mark.parametrize("ending", PACKINGS)
def test_progress_counts_bytes_of_the_file(tmp_path: Path, ending: str) -> None:
    """Bytes of compressed files count as stored, or progress would exceed 100%."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(500)).encode()
    path = plain(tmp_path / f"a.jsonl{ending}", PACKINGS[ending](lines))
    config = SourceConfig()
    (file,) = find_files([str(path)], config)
    (part,) = corpus_format("jsonl").cut(file, config, 1 << 30)
    assert (
        sum(item.size for item in corpus_format("jsonl").read(part, config)) == path.stat().st_size
    )


RECORDS = st.lists(st.text("ab>\n\r é", max_size=9), max_size=30)


@settings(deadline=None, max_examples=150)
@given(
    records=RECORDS,
    size=st.integers(1, 60),
    block=st.integers(1, 40),
    kind=st.sampled_from(["line", "--", "\n\n", "fasta"]),
)
def test_documents_are_independent_of_slices_and_blocks(
    records: list[str], size: int, block: int, kind: str, tmp_path_factory: Any
) -> None:
    """Any slices and blocks give the same documents at the same positions."""
    folder = tmp_path_factory.mktemp("cut")
    if kind == "fasta":
        data = "".join(f">n{k} x\n{record}\n" for k, record in enumerate(records))
        path, options = folder / "a.fa", {}
    elif kind == "line":
        data = "\n".join(records)
        path, options = folder / "a.txt", {"text_documents": "line"}
    else:
        data = kind.join(records)
        path, options = folder / "a.txt", {"text_documents": "separator", "separator": kind}
    path.write_bytes(data.encode())
    whole = read_file(path, **options)
    with small_blocks(block):
        assert read_file(path, size, ReadLimits(block_bytes=block), **options) == whole
    if kind == "line":
        lines = [line.removesuffix("\r") for line in data.split("\n")]
        expected = [(k, line, None) for k, line in enumerate(lines) if line]
        assert [item for item in whole[0] if item[1]] == expected
    elif kind == "--":
        pieces = data.split("--") if data else []
        assert [text for _, text, _ in whole[0]] == pieces[: len(whole[0])]
        assert "--".join(pieces[len(whole[0]) :]) == ""


def test_text_files_are_documents(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.txt.gz", gzip.compress("Où?\n\nIci.\n".encode()))
    assert read_file(path) == ([(0, "Où?\n\nIci.\n", None)], [])


def test_fasta(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.fna", b">one first\nACGT\nacgt\n>two\r\nNN\r\n\r\n>three\n")
    result, problems = read_file(path)
    assert result == [(0, "ACGTacgt", "one"), (1, "NN", "two"), (2, "", "three")]
    assert not problems


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ('"\\ud800"', "half of a surrogate pair in `id`"),
        ('{"a": 1}', "`id` is a JSON dict, not a string or a number"),
        ("[" * 900 + "]" * 900, "`id` is a JSON list, not a string or a number"),
    ],
)
def test_an_id_that_cannot_be_stored_is_a_bad_record(tmp_path: Path, id: str, message: str) -> None:
    ids = ["1.5", id, "null"]
    lines = [f'{{"text": "{text}", "id": {id}}}\n' for text, id in zip("abc", ids, strict=True)]
    path = plain(tmp_path / "a.jsonl", "".join(lines).encode())
    result, [problem] = read_file(path, id_field="id")
    assert result == [(0, "a", "1.5"), (2, "c", None)]
    assert (problem.position, problem.message) == (1, message)


def test_a_line_without_the_id_field_is_a_bad_record(tmp_path: Path) -> None:
    lines = b'{"text": "a", "name": 1}\n{"text": "b"}\n{"text": "c", "name": null}\n'
    result, problems = read_file(plain(tmp_path / "a.jsonl", lines), id_field="name")
    assert result == [(0, "a", "1"), (2, "c", None)]
    assert [(problem.kind, problem.position) for problem in problems] == [("missing field", 1)]
    assert "no field `name` (it has `text`)" in problems[0].message


def test_an_unused_separator_is_an_error() -> None:
    with pytest.raises(ValueError, match="separator needs text_documents"):
        SourceConfig(separator="XX")


BAD = {
    "broken JSON": (b'{"text": "a"}\n{"text": \n{"text": "c"}\n', "a.jsonl", 1, ["a", "c"]),
    "not an object": (b'["text"]\n{"text": "c"}\n', "a.jsonl", 0, ["c"]),
    "missing field": (b'{"text": "a"}\n{"body": "b"}\n', "a.jsonl", 1, ["a"]),
    "not a string": (b'{"text": 5}\n{"text": "c"}\n', "a.jsonl", 0, ["c"]),
    "invalid UTF-8": (b'{"text": "a\xff"}\n{"text": "c"}\n', "a.jsonl", 0, ["c"]),
    "half a pair": (b'{"text": "\\ud83d"}\n{"text": "\\ud83d\\ude42"}\n', "a.jsonl", 0, ["🙂"]),
    "invalid text": (b"a\n\xff\nc\n", "a.txt", 1, ["a", "c"]),
    "no FASTA": (b"ACGT\n>b\nAC\n", "a.fa", 0, ["AC"]),
    "no letters": (b">a\nAC\xc3\xa9\n>b\nAC\n", "a.fa", 0, ["AC"]),
    "a comment": (b">a\nAC\n>b\nAC\n;words\n>c\nAC*-.~\n", "a.fa", 1, ["AC", "AC*-.~"]),
    "lone returns": (b">a\rAC\r>b\rAC\r", "a.fa", 0, []),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_reported_and_the_others_are_read(tmp_path: Path, name: str) -> None:
    data, file, line, rest = BAD[name]
    options = {"text_documents": "line"} if file.endswith(".txt") else {}
    result, problems = read_file(plain(tmp_path / file, data), **options)
    assert [text for _, text, _ in result] == rest
    (problem,) = problems
    assert problem.position == line
    assert f"{file}, " in problem.where() and problem.where().endswith(f" {line + 1}")


def test_blank_lines_count_and_a_broken_line_ends_before_its_line_feed(tmp_path: Path) -> None:
    data = b'\n \t\n{"text": "a"\n\r\n{"text": "b\\nc"}\r\n'
    documents, problems = read_file(plain(tmp_path / "a.jsonl", data))
    assert documents == [(4, "b\nc", None)]
    [problem] = problems
    assert (problem.position, problem.message) == (
        2,
        "Expecting ',' delimiter: line 1 column 13 (char 12)",
    )


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["cut", "damaged"])
def test_documents_before_the_damage_are_read(tmp_path: Path, ending: str, kind: str) -> None:
    import random

    rng = random.Random(0)
    lines = "".join(json.dumps({"text": f"{rng.random()}"}) + "\n" for _ in range(20_000)).encode()
    data = bytearray(PACKINGS[ending](lines))
    if kind == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2 :] = b"\xff" * (len(data) - len(data) // 2)
    result, problems = read_file(plain(tmp_path / f"a.jsonl{ending}", bytes(data)))
    assert [problem.kind for problem in problems] == ["damaged file"]
    whole = [json.loads(line)["text"] for line in lines.splitlines()]
    assert [text for _, text, _ in result] == whole[: len(result)]
    assert len(result) < len(whole)


def test_a_compressed_ending_without_compression_is_damage(tmp_path: Path) -> None:
    _, problems = read_file(plain(tmp_path / "a.jsonl.gz", b'{"text": "a"}\n'))
    assert [problem.kind for problem in problems] == ["damaged file"]


@pytest.mark.parametrize("ending", PACKINGS)
def test_a_byte_order_mark_is_left_out(tmp_path: Path, ending: str) -> None:
    """Only at the beginning of a file; elsewhere it is a character."""
    mark = "\ufeff"
    texts_ = [f"{mark}a", f"b{mark}"] * 30
    lines = mark + "".join(f"{text}\n" for text in texts_)
    records = mark + "".join(
        json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts_
    )
    pack = PACKINGS[ending]
    for name, data, options, expected in (
        ("a.txt", lines, {}, [lines[1:]]),
        ("a.txt", lines, {"text_documents": "line"}, texts_),
        ("a.jsonl", records, {}, texts_),
        ("a.fa", f"{mark}>x\nACGT\n", {}, ["ACGT"]),
    ):
        path = plain(tmp_path / f"{name}{ending}", pack(data.encode()))
        result, problems = read_file(path, size=40, **options)
        assert [text for _, text, _ in result] == expected and not problems


def test_compressed_files_without_the_ending_are_read(tmp_path: Path) -> None:
    documents = texts(50)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    for pack in PACKINGS.values():
        result, problems = read_file(plain(tmp_path / "a.jsonl", pack(lines)), size=100)
        assert [text for _, text, _ in result] == documents and not problems


LOW = ReadLimits(block_bytes=500, document_bytes=3000)


def test_a_mark_after_a_line_that_is_left_out_is_a_character(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.txt", f"{'x' * 9000}\n\ufeffa\n".encode())
    with small_blocks(500):
        result, problems = read_file(path, limits=LOW, text_documents="line")
    assert [text for _, text, _ in result] == ["\ufeffa"] and len(problems) == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "b.txt"])
def test_a_document_above_the_limit_is_rejected_or_split(tmp_path: Path, name: str) -> None:
    def read(**options: Any) -> Records:
        with small_blocks(500):
            return read_file(path, limits=LOW, **options)

    long = "é à " * 2000
    options: dict[str, Any] = {"text_documents": "line"} if name == "a.txt" else {}
    lines = [long] if name == "b.txt" else ["a", long, "c"]
    if name == "a.jsonl":
        lines = [json.dumps({"text": line}, ensure_ascii=False) for line in lines]
    path = plain(tmp_path / name, "\n".join(lines).encode())
    result, problems = read(**options)
    assert [text for _, text, _ in result] == ([] if name == "b.txt" else ["a", "c"])
    assert [problem.kind for problem in problems] == ["too large"]
    if name == "a.jsonl":
        return
    result, problems = read(split_large=True, **options)
    assert not problems
    pieces = [text for position, text, _ in result if position == (0 if name == "b.txt" else 1)]
    assert len(pieces) > 3
    assert "".join(pieces) == long


@pytest.mark.parametrize("size", [2999, 3000, 3001, 3200, 3499, 3600])
@pytest.mark.parametrize("split", [False, True])
def test_the_limit_of_a_document_does_not_depend_on_its_place(
    tmp_path: Path, size: int, split: bool
) -> None:
    long = "x" * size
    for before in range(1, 510, 31):
        lines = ["b" * before, long, "c", long, "d"]
        path = plain(tmp_path / "a.txt", "\n".join(lines).encode())
        with small_blocks(500):
            result, problems = read_file(path, limits=LOW, text_documents="line", split_large=split)
        held = {1: "", 3: ""}
        for position, text, _ in result:
            if position in held:
                held[position] += text
        if size <= 3000 or split:
            assert held == {1: long, 3: long} and not problems
            assert (len(result) == 5) == (size <= 3000), before
        else:
            assert [problem.position for problem in problems] == [1, 3], before
            assert [text for _, text, _ in result] == ["b" * before, "c", "d"]


def test_a_long_line_is_read_by_one_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices within the line do not read it again: that would take quadratic time."""
    path = plain(tmp_path / "a.txt", b"first\n" + b"x" * 200_000)
    config, limits = SourceConfig(text_documents="line"), ReadLimits(block_bytes=1000)
    (file,) = find_files([str(path)], config)
    parts = corpus_format("text").cut(file, config, 2000)
    assert len(parts) == 100
    blocks_read = [
        sum(item.size for item in corpus_format("text").read(p, config, limits)) for p in parts
    ]
    assert blocks_read[0] >= 200_000 and not any(blocks_read[1:])
    read = 0
    inner = delimited.read_full

    def counting(stream: Any, size: int) -> bytes:
        nonlocal read
        data = inner(stream, size)
        read += len(data)
        return data

    monkeypatch.setattr(delimited, "read_full", counting)
    for part in parts[1:]:
        list(corpus_format("text").read(part, config, limits))
    assert read < 2 * path.stat().st_size


@pytest.mark.parametrize("size", [0, 900, 1000, 3500])
def test_a_file_as_one_document_reports_its_bytes_once(tmp_path: Path, size: int) -> None:
    path = plain(tmp_path / "a.txt", b"x" * size)
    config = SourceConfig()
    (file,) = find_files([str(path)], config)
    (part,) = corpus_format("text").cut(file, config, 1 << 20)
    with small_blocks(1000):
        assert sum(texts.size for texts in corpus_format("text").read(part, config)) == size
