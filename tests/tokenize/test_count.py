from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.corpora import ONE, texts, write_jsonl

from headrace.console.errors import InputError, MisuseError
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.chat.config import ChatConfig
from headrace.tokenize.count import (
    PIECE_CHARACTERS,
    Counts,
    count,
    cut_pieces,
    describe,
    make_json_data,
    student_quantile,
)

TALK = {"prompt": "q", "response": "answer"}
UNABLE = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "BPE", "vocab": {"</s>": 0, "a": 1}, "merges": []},
}
"""A tokenizer that only the `tokenizers` library can run, which rejects large texts."""


def config(path: Path) -> BuildConfig:
    return BuildConfig(
        inputs=(str(path),), out="nowhere", tokenizer="byte", engine=ONE, slice_size=50_000
    )


def test_count_of_conversations_is_that_of_their_build(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(TALK) + "\n") * 3)
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}")
    talks = replace(config(path), chat=ChatConfig(template=str(template)))
    counts = count(talks)
    [held] = build(replace(talks, out=str(tmp_path / "out"))).values()
    assert (counts.tokens, counts.error, counts.documents) == (held.tokens, 0, 3)
    assert make_json_data(counts)["learnt_tokens"] == 3 * len("assistant:answer\n")
    assert "51 tokens with a loss (68.0%)" in describe(counts)
    with pytest.raises(MisuseError, match="--chat has whole conversations"):
        count(talks, 0.5)


def test_count_of_a_whole_corpus(tmp_path: Path) -> None:
    documents = [*texts(300), "", "é"]
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    counts = count(config(path))
    size = sum(len(text.encode()) for text in documents)
    assert (counts.documents, counts.bytes) == (301, size)
    assert (counts.tokens, counts.error) == (size + 301, 0)
    assert sum(counts.histogram) == 301
    assert counts.histogram[1] == 1  # é: two tokens
    data = make_json_data(counts)
    assert data["bytes_per_token"] == pytest.approx(size / (size + 301))
    assert "█" in describe(counts)
    assert not (tmp_path / "nowhere").exists()


def test_a_sample_estimates_within_its_error(tmp_path: Path) -> None:
    """BPE, because tokens per byte must differ between documents."""
    from headrace.tokenize.train import TrainConfig, train

    documents = [*texts(3000), *texts(20, seed=5, longest=5000)]
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    tokenizer = tmp_path / "t.json"
    train(TrainConfig(inputs=(str(path),), out=str(tokenizer), vocab_size=300))
    full = BuildConfig(inputs=(str(path),), out="nowhere", tokenizer=str(tokenizer), engine=ONE)
    truth = count(full)
    guess = count(full, 0.1)
    assert truth.error == 0
    assert guess.error is not None and 0 < guess.error < truth.tokens / 20
    assert 200 < guess.sampled < 400
    assert 200 < sum(guess.histogram) < 400
    assert (guess.documents, guess.bytes) == (truth.documents, truth.bytes)
    assert guess.pieces > truth.pieces == truth.documents
    assert abs(guess.tokens - truth.tokens) < 2 * guess.error
    assert f"of {guess.pieces:,} pieces" in describe(guess)
    # How many documents there are of each length, scaled up, is about what there is.
    scaled = np.array(guess.histogram) * 10
    assert np.abs(scaled - np.array(truth.histogram)).max() < 0.2 * truth.documents


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["mixed", "longer is denser"])
def test_the_interval_covers_the_truth_95_times_in_100(spread: float, kind: str) -> None:
    """Simulate many corpora with length distributions from even to extreme, and sample pieces."""
    rng = np.random.default_rng(int(spread * 10) + len(kind))
    held = runs = 0
    for _ in range(400):
        z = rng.normal(size=3000)
        code = rng.random(3000) < (0.3 if kind == "mixed" else np.clip(0.2 + 0.2 * z, 0.02, 0.9))
        rate = np.where(code, 0.45, 0.25) * np.exp(rng.normal(0, 0.1, 3000))
        size = np.ceil(np.exp(7 + spread * z)).astype(int)
        parts = -(-size // PIECE_CHARACTERS)
        owner = np.repeat(np.arange(3000), parts)
        octets = np.full(len(owner), PIECE_CHARACTERS)
        octets[np.cumsum(parts) - 1] = size - (parts - 1) * PIECE_CHARACTERS
        tokens = np.ceil(octets * rate[owner]).astype(np.int64)
        chosen = rng.random(len(owner)) < 0.05
        result = Counts(bytes=int(size.sum()), pieces=len(owner))
        result.measure(tokens[chosen], octets[chosen], np.zeros(int(chosen.sum()), int))
        assert result.error is not None
        held += abs(result.tokens - tokens.sum()) <= result.error
        runs += 1
    assert 0.9 < held / runs < 0.985


def test_equal_documents_are_sampled_independently(tmp_path: Path) -> None:
    """If all copies of a document were chosen or left out together, the error would be wrong."""
    path = write_jsonl(tmp_path / "a.jsonl", ["the same"] * 2000)
    assert 120 < count(config(path), 0.1).sampled < 280


@settings(deadline=None)
@given(text=st.text("ab \n水", min_size=1, max_size=300), size=st.integers(2, 50))
def test_pieces_join_to_their_text(text: str, size: int) -> None:
    pieces = list(cut_pieces(text, size))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)


def test_a_small_sample_has_no_error_estimate(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(20))
    with pytest.raises(InputError, match="the sample has 0 of 20 pieces"):
        count(config(path), 1e-9)
    few = count(config(path), 0.5)
    assert 2 <= few.sampled < 20 and few.error is None
    assert make_json_data(few)["tokens_error"] is None and "error unknown" in describe(few)
    one_document = write_jsonl(tmp_path / "b.jsonl", texts(1))
    assert count(config(one_document)).documents == 1


def test_a_text_that_cannot_be_tokenized_is_a_bad_record(tmp_path: Path) -> None:
    tokenizer = tmp_path / "t.json"
    tokenizer.write_text(json.dumps(UNABLE))
    path = write_jsonl(tmp_path / "a.jsonl", ["aaa", "a" * 5_000_000, "a"])
    full = BuildConfig(inputs=(str(path),), out="no", tokenizer=str(tokenizer), engine=ONE)
    with pytest.raises(InputError, match="too many for the `tokenizers`") as caught:
        count(full)
    assert caught.value.where == f"{path}, record 2"
    result = count(replace(full, on_error="skip"))
    assert (result.documents, result.tokens, result.bad, result.error) == (2, 4 + 2, 1, 0)


@pytest.mark.parametrize("freedom, point", [(29, 2.045), (50, 2.009), (100, 1.984)])
def test_student_s_distribution(freedom: int, point: float) -> None:
    assert student_quantile(freedom) == pytest.approx(point, abs=0.001)


def test_billions_of_bytes_are_gigabytes() -> None:
    assert describe(Counts(documents=1, bytes=1_490_000_000)).startswith("1 document, 1.49 GB of")
