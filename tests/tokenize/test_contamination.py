"""The search for n-grams of evaluations in a dataset, against plain Python."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.data.corpora import ONE, read_dataset, write_jsonl

from headrace.tokenize.cli import main
from headrace.tokenize.contamination import (
    Contamination,
    ContaminationConfig,
    find_contamination,
    join_hits,
)
from headrace.tokenize.corpus.evaluations import EvaluationConfig
from headrace.tokenize.corpus.ngrams import Hit
from headrace.tokenize.executors import ExecutorConfig

N = 5


@pytest.fixture
def evals(tmp_path: Path) -> list[Path]:
    rng = random.Random(5)
    result = [[" ".join(rng.choices("abcdef", k=12)) for _ in range(6)] for _ in range(2)]
    return [write_jsonl(tmp_path / f"{k}-evals.jsonl", texts) for k, texts in enumerate(result)]


@pytest.fixture
def dataset(tmp_path: Path, run_build: Callable[..., Path]) -> Path:
    """Documents of few different words, which have many n-grams of the evaluations."""
    rng = random.Random(6)
    texts = [" ".join(rng.choices("ABCDEF", k=rng.randint(1, 150))) for _ in range(300)]
    return run_build(write_jsonl(tmp_path / "corpus.jsonl", texts), out="data")


def search(dataset: Path, evals: list[Path], engine: ExecutorConfig) -> Contamination:
    names = tuple(map(str, evals))
    config = EvaluationConfig(evaluations=names, ngram=N, fields=("text",))
    return find_contamination(
        ContaminationConfig(dataset=str(dataset), evaluations=config, engine=engine)
    )


def expected(dataset: Path, evals: list[Path]) -> set[tuple[int, str, int, int]]:
    """Return the runs of words of the documents whose n-grams all are in an evaluation."""
    result = set()
    for path in evals:
        known = set()
        for line in path.read_text().splitlines():
            words = json.loads(line)["text"].split()
            known |= {tuple(words[k : k + N]) for k in range(len(words) - N + 1)}
        for number, (_, text, _) in enumerate(read_dataset(dataset)):
            words = text.lower().split()
            starts = [k for k in range(len(words)) if tuple(words[k : k + N]) in known]
            covered = {k + j for k in starts for j in range(N)}
            begun = [
                k
                for k in starts
                if k - 1 not in covered or not any(k - j in starts for j in range(1, N + 1))
            ]
            for k in begun:
                last = k
                while any(nxt := [s for s in starts if last < s <= last + N]):
                    last = max(nxt)
                result.add((number, str(path), k, last + N - k))
    return result


@pytest.mark.parametrize("workers", [1, 2])
def test_the_places_are_those_of_sets(dataset: Path, evals: list[Path], workers: int) -> None:
    result = search(dataset, evals, ExecutorConfig(workers=workers))
    assert result.documents == 300
    answer = [
        (finding.document, finding.evaluation, finding.word, finding.words)
        for finding in result.findings
    ]
    assert set(answer) == expected(dataset, evals)
    assert len(answer) == len(set(answer)) > 50
    documents = read_dataset(dataset)
    for finding in result.findings:
        origin, text, _ = documents[finding.document]
        assert (finding.file, finding.position) == (origin.file, origin.position)
        assert finding.text == text[finding.start : finding.end]
        assert finding.text.split() == text.split()[finding.word : finding.word + finding.words]
        record = json.loads(Path(finding.evaluation).read_text().splitlines()[finding.record])[
            "text"
        ]
        assert " ".join(finding.text.lower().split()[:N]) in record


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1)), max_size=12))
def test_joined_runs_cover_the_same_words(places: list[tuple[int, int]]) -> None:
    hits = [Hit(0, word, 3, evaluation, 0) for word, evaluation in sorted(set(places))]
    runs = join_hits(hits)
    for evaluation in (0, 1):
        words = [h.word + k for h in hits if h.evaluation == evaluation for k in range(3)]
        parts = [range(r.word, r.word + r.words) for r in runs if r.evaluation == evaluation]
        assert sorted(set(words)) == [word for part in parts for word in part]
        assert all(b.start > a.stop for a, b in itertools.pairwise(parts))


def test_a_clean_dataset_has_no_findings(
    tmp_path: Path, evals: list[Path], run_build: Callable[..., Path]
) -> None:
    clean = run_build(write_jsonl(tmp_path / "c.jsonl", ["a b c d", "x y z u v w"]), out="clean")
    assert search(clean, evals, ONE).findings == ()


def test_the_command_prints_and_writes(tmp_path: Path, dataset: Path, evals: list[Path]) -> None:
    out = tmp_path / "found.parquet"
    command = ["contamination", str(dataset), *map(str, evals), "--workers", "1"]
    options = ["--ngram", str(N), "--eval-fields", "text"]
    result = CliRunner().invoke(main, [*command, *options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    expected = search(dataset, evals, ONE)
    assert f"document {expected.findings[0].document} (" in result.output
    assert pq.read_table(out).to_pylist() == [vars(finding) for finding in expected.findings]
    data = json.loads(CliRunner().invoke(main, [*command, *options, "--json"]).stdout)
    assert data["findings"] == [vars(finding) for finding in expected.findings]
    wrong = CliRunner().invoke(main, [*command, "--ngram", "0"])
    assert (wrong.exit_code, "at least 1 word" in wrong.output) == (2, True)
