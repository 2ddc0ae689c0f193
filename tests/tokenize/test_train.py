from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from support.data.corpora import texts, write_jsonl

from headrace.console.errors import InputError, MisuseError
from headrace.tokenize.corpus.inputs import find_files
from headrace.tokenize.train import TrainConfig, sample, train


def taken(path: Path, **options: Any) -> list[str]:
    config = TrainConfig(inputs=(str(path),), out="none", **options)
    texts = sample(find_files(config.inputs, config.source), config)
    return [text.decode() for text in texts]


def size(documents: list[str]) -> int:
    return sum(len(text.encode()) for text in documents)


def test_splitting_and_merging_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer of `tokenizers` asks for the texts while it splits them, and then merges."""
    path = write_jsonl(tmp_path / "a.jsonl", texts(2000))
    train(TrainConfig(inputs=(str(path),), out=str(tmp_path / "bpe.json"), vocab_size=300))
    lines = [line for line in capsys.readouterr().err.splitlines() if "sample:" not in line]
    labels = ["sampling", "splitting", "counting words and merging, up to 300 tokens"]
    assert [line.partition(":")[0] for line in lines] == labels
    assert "(100%)" in lines[1]


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_sample_size_is_independent_of_compression(tmp_path: Path, packing: str) -> None:
    documents = texts(500)
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    if packing:
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert taken(path) == documents
    expected = size(documents) // 5
    some = taken(path, sample_bytes=expected)
    assert some == taken(path, sample_bytes=expected)
    assert some == [text for text in documents if text in set(some)]
    assert expected <= size(some) <= expected + max(len(text.encode()) for text in documents)
    places = [documents.index(text) for text in some]
    assert 200 < sum(places) / len(places) < 300, "the sample covers the whole corpus"


def test_sample_is_independent_of_order_and_counts_equal_documents_once(tmp_path: Path) -> None:
    documents = texts(200)
    corpus = write_jsonl(tmp_path / "a.jsonl", documents)
    shuffled = write_jsonl(tmp_path / "b.jsonl", [*documents[::-1], *documents[:50] * 20])
    expected = size(documents) // 4
    assert sorted(taken(corpus, sample_bytes=expected)) == sorted(
        taken(shuffled, sample_bytes=expected)
    )


def test_a_sample_has_at_least_one_document(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(3, longest=500))
    assert len(taken(path, sample_bytes=1)) == 1
    with pytest.raises(InputError, match="no text to train on"):
        taken(write_jsonl(tmp_path / "b.jsonl", [""]))
    with pytest.raises(ValueError, match="sample_bytes is 0"):
        TrainConfig(inputs=("a",), out="b", sample_bytes=0)


def test_bad_records_are_errors_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"body": "two"}\n{"text": "three"}\n')
    with pytest.raises(InputError, match="no field `text`") as caught:
        taken(path)
    assert caught.value.where == f"{path}, line 2"
    assert "--on-error skip" in str(caught.value.hint)
    assert taken(path, on_error="skip") == ["one", "three"]
    assert "left out" in caplog.text and "a.jsonl, line 2: missing field" in caplog.text


def test_a_folder_as_output_is_an_error_before_reading(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="is a folder"):
        train(TrainConfig(inputs=("nowhere",), out=str(tmp_path)))
