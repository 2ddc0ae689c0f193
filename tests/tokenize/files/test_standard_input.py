"""Standard input as a corpus: read once, built like a file."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from support.data.corpora import read_dataset, snapshot, texts

from headrace.console.errors import UserError
from headrace.dataplane.datasets import manifest
from headrace.tokenize.builder import build as build_module
from headrace.tokenize.builder.build import BuildConfig
from headrace.tokenize.cli import main
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.sources.format import SourceConfig

Run = Callable[..., Path]
WORDS = texts(60)
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in WORDS).encode()


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Return a function that fills standard input."""

    def fill(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return fill


def parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": WORDS}), out)
    return out.getvalue()


def arrow(new: Any) -> bytes:
    out = io.BytesIO()
    table = pa.table({"text": WORDS})
    with new(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        JSONL,
        b"\xef\xbb\xbf\n" + JSONL,
        gzip.compress(JSONL),
        lzma.compress(JSONL),
        parquet(),
        arrow(pa.ipc.new_file),
        arrow(pa.ipc.new_stream),
    ],
    ids=["jsonl", "bom", "gzip", "xz", "parquet", "arrow", "arrow stream"],
)
def test_its_format_is_that_of_its_first_bytes(
    run_build: Run, pipe: Callable[[bytes], None], data: bytes
) -> None:
    pipe(data)
    held = read_dataset(run_build("-"))
    assert [text for _, text, _ in held] == WORDS
    assert {origin.file[:14] for origin, _, _ in held} == {"standard input"}


def test_every_killed_build_ends_with_the_same_bytes(
    tmp_path: Path, run_build: Run, pipe: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(JSONL)
    whole = snapshot(run_build("/dev/stdin", out="whole"))
    for name in ("check_drops", "commit", "remove_garbage"):

        def kill(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(build_module, name, kill)
            pipe(JSONL)
            run_build("-")
        assert list((tmp_path / "out/work/stdin").iterdir())
    pipe(JSONL)
    out = run_build("-", engine=ExecutorConfig(workers=2))
    assert snapshot(out) == whole
    assert not (out / "work").exists()
    next(iter((out / "shards").iterdir())).unlink()
    pipe(JSONL)
    assert snapshot(run_build("-")) == whole  # a lost shard is written again


def test_each_content_is_an_input_once(
    tmp_path: Path, run_build: Run, pipe: Callable[[bytes], None]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    for data, inputs, documents in (
        (JSONL, ["-"], 60),
        (JSONL, ["-"], 60),
        (b"", [tmp_path / "a.jsonl"], 60),  # a copy of it
        (b'{"text": "more"}\n', ["-", tmp_path / "a.jsonl"], 61),
    ):
        pipe(data)
        out = run_build(*inputs)
        assert manifest.load(str(out)).documents == documents
    assert len(manifest.load(str(out)).generations) == 2


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (b"some words", {}, "the format of standard input is not known"),
        (b"", {}, "standard input is empty"),
        (b'{"text": "a"}', {"source": SourceConfig(text_documents="line")}, "is for text"),
        (b'{"text": "a"}\n{"txt": 1}', {}, "missing field"),
    ],
)
def test_what_cannot_be_built_is_named(
    run_build: Run,
    pipe: Callable[[bytes], None],
    data: bytes,
    options: dict[str, Any],
    message: str,
) -> None:
    pipe(data)
    with pytest.raises(UserError, match=message) as caught:
        run_build("-", **options)
    if message == "missing field":
        assert str(caught.value.where).startswith("standard input")
    pipe(data)
    if message == "the format of standard input is not known":
        held = read_dataset(run_build("-", source=SourceConfig(format="text")))
        assert [text for _, text, _ in held] == ["some words"]


def test_other_commands_read_it_or_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> Any:
        return CliRunner().invoke(main, line.split(), input=JSONL)

    counted = run("count - --tokenizer byte --workers 1 --json")
    assert json.loads(counted.stdout)["documents"] == 60
    assert "300 tokens" in run("train - --vocab-size 300 --out t.json").stderr
    refused = run("neardup - --out list.parquet")
    assert refused.exit_code == 1 and "can be standard input" in refused.stderr
    with pytest.raises(ValueError, match="kept on this machine"):
        BuildConfig(
            inputs=("-",), out="s3://b/x", tokenizer="byte", engine=ExecutorConfig(kind="ray")
        )
