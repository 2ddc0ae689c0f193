"""Decontamination, against sets of n-grams in plain Python."""

from __future__ import annotations

import gzip
import json
import random
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.data.corpora import read_dataset, snapshot, write_jsonl

from headrace.console.errors import InputError, StorageError
from headrace.dataplane.datasets import manifest
from headrace.tokenize.cli import main
from headrace.tokenize.corpus.decontaminate import MARGIN, MAX_CUTS, MIN_PIECE, cut
from headrace.tokenize.corpus.evaluations import EvaluationConfig, read_evaluations
from headrace.tokenize.corpus.words import fold, word_spans
from headrace.tokenize.executors import ExecutorConfig

Run = Callable[..., Path]
ALPHABET = "abc DE\n.,'-éßΣς\u0301\u2019\u2026\u00a0水車がか\u3099，½¨\ufe0f🙂\x1e\x00１"


def words_of(text: str) -> list[str]:
    """Return the words of a text, character by character."""
    result = ""
    for character in unicodedata.normalize("NFKC", text):
        small = next(
            (item for item in (character.casefold(), character.lower()) if len(item) == 1),
            character,
        )
        if character.isspace():
            result += " "
        elif unicodedata.category(character)[0] in "LMN" and character != "\ufe0f":
            result += f" {small} " if character in "水車がか\u3099" else small
    return result.split()


def ngrams_of(texts: Sequence[str], n: int) -> set[tuple[str, ...]]:
    lists = [words_of(text) for text in texts]
    return {tuple(words[k : k + n]) for words in lists for k in range(len(words) - n + 1)}


@given(st.lists(st.text(ALPHABET, max_size=40), max_size=5))
def test_words_are_those_of_the_definition(texts: list[str]) -> None:
    folded = [line.decode().split() for line in fold(texts)]
    assert folded == [words_of(text) for text in texts]
    for text, words in zip(texts, folded, strict=True):
        places = word_spans(text)
        assert len(places) == len(words)
        assert places == sorted(places)


def test_the_place_of_a_word_is_that_in_the_text() -> None:
    text = "Don\u2019t stop,\u00a0水車は回る！ ＡＢＣ"
    words = [text[start:end] for start, end in word_spans(text)]
    assert words == ["Don\u2019t", "stop,", "水", "車", "は", "回", "る", "ＡＢＣ"]


TEXT = st.lists(st.sampled_from(["a", "b", "C", "d.", "水", "é"]), max_size=30).map(" ".join)


@given(
    texts=st.lists(TEXT, max_size=6),
    evaluation_texts=st.lists(TEXT, min_size=1, max_size=4),
    n=st.integers(1, 6),
)
def test_hits_are_the_n_grams_of_sets(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], evaluation_texts: list[str], n: int
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("evals") / "a.jsonl", evaluation_texts)
    known = ngrams_of(evaluation_texts, n)
    config = EvaluationConfig(evaluations=(str(path),), ngram=n, fields=("text",))
    if not known:
        with pytest.raises(InputError, match=r"no text|fewer than"):
            read_evaluations(config)
        return
    result = {
        (hit.text, hit.word): tuple(words_of(texts[hit.text])[hit.word : hit.word + n])
        for hit in read_evaluations(config).ngrams.find(texts)
    }
    expected = {
        (text, word): run
        for text, words in enumerate(map(words_of, texts))
        for word in range(len(words) - n + 1)
        if (run := tuple(words[word : word + n])) in known
    }
    assert result == expected


VOCABULARY = [f"{letter}{number}" for letter in "abcdefg" for number in range(40)]


def sentences(count: int, words: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(VOCABULARY, k=words)) for _ in range(count)]


@pytest.fixture
def evals(tmp_path: Path) -> Path:
    """Two evaluations: JSON lines packed with gzip, and Parquet."""
    folder = tmp_path / "evals"
    folder.mkdir()
    questions = sentences(20, 30, seed=1)
    with gzip.open(folder / "questions.jsonl.gz", "wt") as out:
        for text in questions:
            out.write(json.dumps({"question": text, "choices": ["yes", "no"], "number": 3}) + "\n")
    pq.write_table(pa.table({"body": sentences(10, 20, seed=2)}), folder / "bodies.parquet")
    return folder


@pytest.fixture
def planted(tmp_path: Path, evals: Path) -> Path:
    """A corpus of 120 documents, of which every tenth has 13 words of an evaluation, written
    otherwise, and every tenth has 12."""
    bodies = pq.read_table(evals / "bodies.parquet").column("body").to_pylist()
    rng = random.Random(3)
    documents = []
    for number, text in enumerate(sentences(120, 300, seed=4)):
        words = text.split()
        if number % 10 < 2:
            source = (sentences(20, 30, seed=1) if number % 20 < 10 else bodies)[number % 9]
            start = rng.randrange(5)
            run = source.split()[start : start + 13 - number % 10]
            words[120:120] = [word.upper() + "," for word in run]
        documents.append(" ".join(words))
    for number in range(3):
        write_jsonl(tmp_path / "corpus" / f"{number}.jsonl", documents[number::3])
    return tmp_path / "corpus"


def options_of(evals: Path, **options: Any) -> dict[str, Any]:
    names = (f"{evals}/**/*",)
    return {"decontaminate": EvaluationConfig(evaluations=names, **options)}


def counts_of(out: Path) -> dict[str, int]:
    counts: dict[str, int] = manifest.load(str(out)).generations[-1].provenance["counts"]
    return counts


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_with_an_n_gram_are_dropped(
    planted: Path, evals: Path, run_build: Run, workers: int
) -> None:
    whole = [(o.file, o.position, text) for o, text, _ in read_dataset(run_build(planted, out="a"))]
    out = run_build(planted, engine=ExecutorConfig(workers=workers), **options_of(evals))
    known = {
        "questions.jsonl.gz": ngrams_of(sentences(20, 30, seed=1), 13),
        "bodies.parquet": ngrams_of(sentences(10, 20, seed=2), 13),
    }
    hit = {
        name: [not grams.isdisjoint(ngrams_of([row[2]], 13)) for row in whole]
        for name, grams in known.items()
    }
    remaining = [row for k, row in enumerate(whole) if not any(hits[k] for hits in hit.values())]
    assert [(o.file, o.position, text) for o, text, _ in read_dataset(out)] == remaining
    assert len(remaining) == 108  # 13 words of 12 documents; the 12 words of others are no n-gram
    counts = counts_of(out)
    assert counts["dropped by decontamination"] == 12
    assert counts["documents read"] == 120
    for name, hits in hit.items():
        assert counts[f"contaminated by {evals / name}"] == sum(hits) > 0
    (result,) = manifest.load(str(out)).generations
    assert [(e["name"], e["documents"], e["short"]) for e in result.provenance["evaluations"]] == [
        (str(evals / "bodies.parquet"), 10, 0),
        (str(evals / "questions.jsonl.gz"), 20, 0),
    ]
    assert len([note for note in result.provenance["notes"] if "contaminated" in note]) == 12


def test_n_grams_are_cut_out_with_what_is_around_them(
    planted: Path, evals: Path, run_build: Run
) -> None:
    whole = {(o.file, o.position): text for o, text, _ in read_dataset(run_build(planted, out="a"))}
    out = run_build(planted, contaminated="cut", shuffle=3, **options_of(evals))
    known = ngrams_of([*sentences(20, 30, seed=1), *sentences(10, 20, seed=2)], 13)
    pieces_by_document: dict[tuple[str, int], list[str]] = {place: [] for place in whole}
    for origin, text, _ in read_dataset(out):
        pieces_by_document[origin.file, origin.position].append(text)
        assert known.isdisjoint(ngrams_of([text], 13))
    cut_ones = 0
    for place, text in whole.items():
        if known.isdisjoint(ngrams_of([text], 13)):
            assert pieces_by_document[place] == [text]
            continue
        cut_ones += 1
        words = list(re.finditer(r"\S+", text))
        runs = [
            tuple(words_of(" ".join(w[0] for w in words[k : k + 13]))) for k in range(len(words))
        ]
        hits = [k for k, run in enumerate(runs) if run in known]
        low, high = words[hits[0]].start() - MARGIN, words[hits[-1] + 12].end() + MARGIN
        stay = ["".join(f" {w[0]}" for w in words if w.start() < low), ""]
        stay[1] = "".join(f" {w[0]}" for w in words if w.end() > high)
        assert sorted(pieces_by_document[place]) == sorted(
            p[1:] for p in stay if len(p) > MIN_PIECE
        )
    counts = counts_of(out)
    assert counts["documents cut by decontamination"] == cut_ones == 12
    assert (
        counts["pieces of cut documents"] == sum(len(p) for p in pieces_by_document.values()) - 108
    )
    assert counts["documents read"] == 120


def test_a_document_with_many_places_is_left_out() -> None:
    from headrace.tokenize.corpus.ngrams import Hit

    text = " ".join(["word"] * 10_000)

    def hits(count: int) -> list[Hit]:
        return [Hit(0, 500 * k + 200, 13, 0, 0) for k in range(count)]

    assert len(cut(text, hits(MAX_CUTS - 1))) == MAX_CUTS
    assert cut(text, hits(MAX_CUTS)) == []


@pytest.mark.parametrize("action", ["drop", "cut"])
def test_a_killed_build_resumes_with_the_same_bytes(
    planted: Path, evals: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    options = {**options_of(evals), "contaminated": action, "shuffle": 2, "dedup": "exact"}
    whole = snapshot(run_build(planted, out="whole", **options))
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_build(planted, **options)
    assert snapshot(run_build(planted, **options)) == whole


def test_other_evaluations_are_another_build(planted: Path, evals: Path, run_build: Run) -> None:
    run_build(planted, **options_of(evals))
    run_build(planted, **options_of(evals))
    for changed in (
        options_of(evals, ngram=8),
        options_of(evals, match_short=5),
        {**options_of(evals), "contaminated": "cut"},
        {},
    ):
        with pytest.raises(StorageError, match="other settings: decontaminate was"):
            run_build(planted, **changed)
    write_jsonl(evals / "more.jsonl", ["one more question of this evaluation" * 5])
    with pytest.raises(StorageError, match="other settings: decontaminate was"):
        run_build(planted, **options_of(evals))


def test_short_documents_are_named_or_matched_whole(
    tmp_path: Path, run_build: Run, caplog: pytest.LogCaptureFixture
) -> None:
    evals = write_jsonl(tmp_path / "e.jsonl", ["a " * 13, "who built the old mill", "which wheel"])
    corpus = write_jsonl(tmp_path / "c.jsonl", ["so, Who built the old mill? He.", "which wheel"])
    kept = run_build(
        corpus, decontaminate=EvaluationConfig(evaluations=(str(evals),), fields=("text",))
    )
    assert "2 of 3 documents have fewer than 13 words" in caplog.text
    assert "the first is record 2" in caplog.text
    assert len(read_dataset(kept)) == 2
    (read,) = manifest.load(str(kept)).generations[0].provenance["evaluations"]
    assert (read["short"], read["unmatched"], read["records"]) == (2, 2, [1, 2])
    config = EvaluationConfig(evaluations=(str(evals),), fields=("text",), match_short=5)
    matched = run_build(corpus, decontaminate=config, out="matched")
    assert [text for _, text, _ in read_dataset(matched)] == ["which wheel"]
    (read,) = manifest.load(str(matched)).generations[0].provenance["evaluations"]
    assert (read["short"], read["unmatched"], read["records"]) == (2, 1, [2])


@pytest.mark.parametrize(
    ("text", "options", "message", "where"),
    [
        ('{"n": 3}\n{"n": []}\n', {}, "has no text in its 2 records", ""),
        ('{"q": "a"}\n', {}, "fewer than 13 words", ""),
        ('{"q": "a"}\n{"r": 1}\n', {"fields": ("q",)}, "has no field `q`.*`r`", "line 2"),
        ('{"q": "a"}\n\n{"r"\n', {}, "not JSON", "line 3"),
    ],
)
def test_a_wrong_evaluation_is_an_error(
    tmp_path: Path, corpus: Path, run_build: Run, text: str, options: Any, message: str, where: str
) -> None:
    (tmp_path / "e.jsonl").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        run_build(
            corpus,
            **options_of(tmp_path / "e.jsonl", **options)
            | {
                "decontaminate": EvaluationConfig(
                    evaluations=(str(tmp_path / "e.jsonl"),), **options
                )
            },
        )
    assert "e.jsonl" in str(caught.value)
    assert where in str(caught.value)
    assert caught.value.hint


def test_the_command_line(tmp_path: Path, planted: Path, evals: Path) -> None:
    command = ["build", str(planted), "--tokenizer", "byte", "--out", str(tmp_path / "out")]
    command += ["--workers", "1"]

    def run(*words: str) -> Any:
        return CliRunner().invoke(main, [*command, *words])

    for words, message in (
        (("--ngram", "8"), "--ngram needs --decontaminate"),
        (("--eval-fields", "a"), "--eval-fields needs --decontaminate"),
        (("--contaminated", "cut"), "--contaminated needs --decontaminate"),
        (("--decontaminate", str(evals), "--ngram", "0"), "must be at least 1 word"),
        (("--decontaminate", str(evals), "--match-short", "13"), "less than ngram"),
    ):
        result = run(*words)
        assert (result.exit_code, message in result.output) == (2, True), result.output
    missing = run("--decontaminate", f"{evals}/none/*.jsonl")
    assert (missing.exit_code, "no files at" in missing.output) == (1, True)
    result = run("--decontaminate", f"{evals}/*")
    assert result.exit_code == 0, result.output
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "out")]).output
    assert "dropped by decontamination: 12" in shown
    assert "questions.jsonl.gz: 6" in shown
    card = CliRunner().invoke(main, ["card", str(tmp_path / "out")]).output
    assert "dropped by decontamination" in card
