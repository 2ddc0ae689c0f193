from __future__ import annotations

from pathlib import Path

import pytest
from corpora import ONE, texts, write_jsonl

from headrace.console.errors import InputError
from headrace.tokenize.build import BuildConfig
from headrace.tokenize.count import Counts, as_data, count, describe


def config(path: Path) -> BuildConfig:
    return BuildConfig(
        inputs=(str(path),), out="nowhere", tokenizer="byte", engine=ONE, slice_size=50_000
    )


def test_everything_is_counted(tmp_path: Path) -> None:
    documents = [*texts(300), "", "é"]
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    counts = count(config(path))
    size = sum(len(text.encode()) for text in documents)
    assert (counts.documents, counts.bytes) == (301, size)
    assert (counts.tokens, counts.error) == (size + 301, 0)
    assert sum(counts.histogram) == 301
    assert counts.histogram[1] == 1  # é: two tokens
    data = as_data(counts)
    assert data["bytes_per_token"] == pytest.approx(size / (size + 301))
    assert "█" in describe(counts)
    assert not (tmp_path / "nowhere").exists()


def test_a_sample_estimates_within_its_error(tmp_path: Path) -> None:
    """Tokens per byte must differ between documents, or there is nothing to estimate: BPE."""
    from headrace.tokenize.train import TrainConfig, train

    documents = texts(3000)
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    tokenizer = tmp_path / "t.json"
    train(TrainConfig(inputs=(str(path),), out=str(tokenizer), vocab_size=300))
    full = BuildConfig(inputs=(str(path),), out="nowhere", tokenizer=str(tokenizer), engine=ONE)
    truth = count(full)
    guess = count(full, 0.1)
    assert truth.error == 0 < guess.error < truth.tokens / 20
    assert 200 < guess.sampled < 400
    assert guess.documents == truth.documents
    assert abs(guess.tokens - truth.tokens) < 2 * guess.error


def test_a_sample_without_documents_estimates_nothing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(20))
    with pytest.raises(InputError, match="the sample holds 0 of 20 documents"):
        count(config(path), 1e-9)
    one = write_jsonl(tmp_path / "b.jsonl", texts(1))
    assert count(config(one)).documents == 1


def test_billions_of_bytes_are_gigabytes() -> None:
    assert describe(Counts(documents=1, bytes=1_490_000_000)).startswith("1 documents, 1.49GB of")
