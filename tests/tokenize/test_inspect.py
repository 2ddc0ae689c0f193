from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from corpora import read_dataset, texts, write_jsonl

from headrace.console.errors import InputError
from headrace.dataplane.datasets import manifest
from headrace.tokenize import inspect
from headrace.tokenize.sources.format import SourceConfig

Run = Callable[..., Path]
BY_NAME = SourceConfig(id_field="name")


@pytest.mark.parametrize("options", [{}, {"shuffle": 3, "format": "mds", "compression": "zstd"}])
def test_every_document_is_shown_with_its_origin(
    corpus: Path, run_build: Run, options: dict[str, object]
) -> None:
    out = str(run_build(corpus, source=BY_NAME, **options))
    for number, (origin, text, ids) in enumerate(read_dataset(out)):
        assert inspect.document(out, number) == inspect.ShownDocument(origin, None, ids)
        assert inspect.text(out, ids) == f"{text}<|endoftext|>"


def test_an_unknown_document_number_is_an_error(corpus: Path, run_build: Run) -> None:
    out = str(run_build(corpus))
    for number in (-1, 244):
        with pytest.raises(InputError, match=f"244 documents, and none has number {number}"):
            inspect.document(out, number)


def test_summary_and_description_of_a_dataset(corpus: Path, run_build: Run) -> None:
    out = run_build(corpus, dedup="exact")
    write_jsonl(corpus / "9.jsonl", [*texts(5, seed=9), "twice", "twice"])
    run_build(corpus, dedup="exact")
    made = manifest.load(str(out))
    found = inspect.summary(str(out))
    assert (found["hash"], found["documents"], found["tokens"]) == (
        made.hash,
        250,
        made.tokens,
    )
    first, second = found["generations"]
    assert (first["documents"], second["documents"]) == (244, 6)
    assert second["counts"]["duplicates"] == 1
    assert second["inputs"]["files"] == 1
    text = inspect.describe(str(out))
    assert made.hash in text
    assert f"{made.tokens:,} tokens in 250 documents" in text
    assert "generation 1: 6 documents" in text
    assert "duplicates: 1" in text
    assert "documents end with 256" in text
