"""WARC and WET: files of warcio read as it reads them, and every kind of bad record."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from support.data.corpora import read_file, small_blocks, texts
from warcio.archiveiterator import ArchiveIterator
from warcio.warcwriter import WARCWriter

from headrace.tokenize.sources.format import ReadLimits


def write_wet(path: Path, documents: list[str], *, gzip: bool = False) -> Path:
    """Write documents as Common Crawl's WET files have them, with records that hold no text."""
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=gzip)
        writer.write_record(writer.create_warcinfo_record("a.wet", {"software": "a test"}))
        for number, text in enumerate(documents):
            record = writer.create_warc_record(
                f"https://example.org/{number}",
                "conversion",
                payload=io.BytesIO(text.encode()),
                warc_content_type="text/plain",
                warc_headers_dict={"WARC-Identified-Content-Language": f"l{number}"},
            )
            writer.write_record(record)
    return path


@pytest.mark.parametrize("name", ["a.wet", "a.warc.wet.gz"])
@pytest.mark.parametrize("block", [7, 4 << 20])
def test_wet(tmp_path: Path, name: str, block: int) -> None:
    documents = [*texts(20), "a\r\n\r\nWARC/1.0\r\n\r\nb", "last"]
    path = write_wet(tmp_path / name, documents, gzip=name.endswith("gz"))
    with path.open("rb") as file:
        peers = [
            (record.rec_headers["WARC-Target-URI"], record.content_stream().read().decode())
            for record in ArchiveIterator(file)
            if record.rec_type == "conversion"
        ]
    with small_blocks(max(block, 64)):
        result, problems = read_file(path, limits=ReadLimits(block_bytes=block))
    assert not problems
    assert [(id, text) for _, text, id in result] == peers
    assert [text for _, text, _ in result] == documents
    assert [number for number, _, _ in result] == list(range(1, len(documents) + 1))
    languages = read_file(path, id_field="WARC-Identified-Content-Language")[0]
    assert [id for _, _, id in languages] == [f"l{k}" for k in range(len(documents))]


def record(kind: str, content: bytes, type: str = "text/plain", length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: {type}\r\nContent-Length: {size}"
    return head.encode() + b"\r\n\r\n" + content + b"\r\n\r\n"


def test_bad_records(tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(
        record("request", b"GET /")
        + record("response", b"HTTP/1.1 200 OK", "application/http")
        + record("resource", b"<html>", "text/html; charset=utf-8")
        + record("conversion", b"\xff")
        + record("conversion", b"x" * 51)
        + record("conversion", b"good", "text/plain; charset=utf-8")
    )
    result, problems = read_file(path, limits=ReadLimits(document_bytes=50))
    assert [(number, text) for number, text, _ in result] == [(5, "good")]
    assert [(p.kind, p.position) for p in problems] == [
        ("not text", 1),
        ("not text", 2),
        ("invalid UTF-8", 3),
        ("too large", 4),
    ]


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (record("conversion", b"cut")[:-6], "the content of a record is cut off"),
        (record("conversion", b"short", length=2), "does not end with two line breaks"),
        (b"WARC/1.0\r\nWARC-Type: conversion\r\n\r\n", "without a valid Content-Length"),
        (record("conversion", b"", length=-1), "without a valid Content-Length"),
        (b"WARC/1.0\r\nWARC-Type: x", "the headers of a record are cut off"),
        (b"<html>\r\n\r\n", "a record begins with '<html>'"),
    ],
)
def test_a_damaged_file(tmp_path: Path, tail: bytes, message: str) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(record("conversion", b"first") + tail)
    result, (problem,) = read_file(path)
    assert [text for _, text, _ in result] == ["first"]
    assert problem.kind == "damaged file"
    assert message in problem.message
    assert problem.position == 1
