"""Summaries of training data, against the exposures of every document, one by one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy
from support.data.corpora import ONE, keep, texts, write_lines
from support.data.plan_data import write_ledger, write_taken_run
from support.data.small_data import plan_of

from headrace.console import config
from headrace.console.errors import ConfigError, PlanError
from headrace.dataplane.datasets import about
from headrace.dataplane.datasets.about import About
from headrace.dataplane.datasets.dataset import Dataset
from headrace.mixtures.cli import main
from headrace.mixtures.disclosure.eu import summarize_for_eu
from headrace.mixtures.disclosure.facts import TrainingFacts, gather_facts
from headrace.mixtures.disclosure.served_tokens import ServedTokens
from headrace.mixtures.disclosure.statement import Statement, render_statement
from headrace.mixtures.exposure.answers import DocumentAnswer
from headrace.mixtures.exposure.find import Finder
from headrace.mixtures.exposure.lineage import open_lineages
from headrace.mixtures.exposure.request import DocumentRequest
from headrace.tokenize.builder.build import BuildConfig, build

KINDS = {"language": "language:list<string>"}
LANGUAGES = [["en"], ["de", "fr", ""], None, ["en", "en"]]
HOSTS = {
    "https://www.Mill.example/a?b": "mill.example",
    "http://user@stream.example:80/": "stream.example",
    "https://a.news.co.uk./b": "news.co.uk",
    "http://10.0.0.1/c": "10.0.0.1",
    "https://wheel.stream.example": "stream.example",
    "no URL": None,
    None: None,
}
STATED = {
    "provider": {"name": "Mill Ltd", "contact": "data@mill.example"},
    "model": {"name": "mill-1"},
    "sources": {
        "web": {"category": "crawled", "crawlers": ["millbot"], "link": "https://mill.example"},
        "code": {"category": "public", "name": "Open code", "acquired": "2026-01-31"},
    },
}


def build_corpus(folder: Path, name: str, count: int, **fields: Any) -> str:
    """Build a dataset whose documents have fields, each by the document's number."""
    records = [
        {"text": text, "id": f"{name}-{number}"}
        | {key: values[number % len(values)] for key, values in fields.items()}
        for number, text in enumerate(texts(count, seed=len(name)))
    ]
    corpus = write_lines(folder / f"{name}.jsonl", records)
    build(
        BuildConfig(
            inputs=(str(corpus),),
            out=str(folder / name),
            tokenizer="byte",
            source=keep(
                *(f"{key}:list<string>?" if key == "language" else f"{key}?" for key in fields)
            ),
            engine=ONE,
        )
    )
    return str(folder / name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A branch of a run that skipped a step and rolled back. It reads `code` several times."""
    folder = tmp_path_factory.mktemp("world")
    dates = ["2025-01-01", "2026-02-03", None, "31/12/2027"]
    web = build_corpus(folder, "web", 120, language=LANGUAGES, url=list(HOSTS), date=dates)
    code = build_corpus(folder, "code", 10)
    about.save(code, About(licenses=("MIT", "Apache-2.0"), sources=("repositories",)))
    phase = {"seq_len": 32, "batch": 256, "weights": {"web": 0.5, "code": 0.5}}
    base = plan_of(
        {
            "chunk": 128,
            "window": 4,
            "sources": {"web": {"data": web}, "code": {"data": code, "max_epochs": 9}},
            "phases": {
                "short": {"tokens": 8_192, **phase},
                "long": {"tokens": 4_096, **phase, "seq_len": 64},
            },
        }
    )
    first = write_taken_run(folder / "first", base, 40)
    lines = [json.loads(line) for line in (first / "ledger.jsonl").read_text().splitlines()]
    lines[3] |= {"skipped": True, "why": "not finite"}
    lines[9] |= {"skipped": True, "why": "spike", "back_to": 6}
    write_ledger(first, lines)
    branch = plan_of(
        {
            "after": {"run": str(first), "step": 36},
            "phases": {"more": {"tokens": 2_048, "seq_len": 64, "weights": {"code": 1}}},
        }
    )
    return write_taken_run(folder / "branch", branch, 3)


def gather(run: Path, stated: Mapping[str, Any] = STATED) -> TrainingFacts:
    statement = config.build(Statement, dict(stated), source="stated")
    return gather_facts(str(run), statement, "stated")


def count_by_document(run: Path, source: str, step: int | None = None) -> dict[int, int]:
    """Sum up the tokens of documents in rows that the weights hold, by the search for documents.
    `step`: of a checkpoint."""
    (lineage,) = open_lineages([str(run)])
    count = Dataset(str(run.parent / source)).manifest.documents
    finder = Finder(DocumentRequest(frozenset(), tuple(range(count))), source)
    return {
        answer.document: sum(
            exposure.tokens
            for exposure in answer.exposures
            if exposure.seen
            and (not exposure.undone if step is None else exposure.first_checkpoint == step)
        )
        for answer in finder.find(lineage)
        if isinstance(answer, DocumentAnswer)
    }


def test_tokens_are_those_of_the_documents_that_the_weights_hold(run: Path) -> None:
    for facts in gather(run).sources:
        counts = count_by_document(run, facts.name)
        assert facts.tally is not None
        assert facts.tally.tokens == facts.served_tokens == sum(counts.values())
        assert facts.tally.documents == sum(count > 0 for count in counts.values())
        assert facts.tally.distinct_tokens == facts.distinct_tokens <= facts.served_tokens
    web, code = gather(run).sources
    assert code.served_tokens > 1.5 * code.distinct_tokens  # epochs
    assert web.served_tokens == web.distinct_tokens
    assert web.tally is not None and web.tally.documents < 120  # a part of an epoch


def test_languages_and_domains_by_the_tokens_seen(run: Path) -> None:
    web, code = gather(run).sources
    assert web.languages is not None and web.domains is not None and code.languages is None
    languages, hosts = Counter[str](), Counter[str]()
    no_language = no_host = no_date = 0
    for number, tokens in count_by_document(run, "web").items():
        values = LANGUAGES[number % len(LANGUAGES)]
        languages.update({value: tokens for value in values or [] if value and tokens})
        no_language += tokens * (values is None)
        host = list(HOSTS.values())[number % len(HOSTS)]
        hosts.update({host: tokens} if host and tokens else {})
        no_host += tokens * (host is None)
        no_date += tokens * (number % 4 > 1)
    assert (web.languages.tokens, web.languages.unknown) == (languages, no_language)
    assert (web.domains.tokens, web.domains.unknown) == (hosts, no_host)
    assert web.tally is not None and web.tally.undated == no_date
    page = summarize_for_eu(gather(run))
    answers = {answer.question[:11]: answer.text for section in page for answer in section.answers}
    assert (
        answers["Latest date"]
        == f"2026-02-03; {no_date:,} tokens come from documents without a date"
    )
    assert web.newest == "2026-02-03" and gather(run).newest == "2026-02-03"
    assert gather(run, {}).newest is None  # `code` keeps no dates, and none is stated


@pytest.mark.parametrize("step", [5, 8, 10])
def test_a_checkpoint_holds_the_rows_before_it(run: Path, step: int) -> None:
    """Step 3 was skipped; at step 9 the run went back to 6, after the checkpoint of step 8."""
    first = run.parent / "first"
    statement = config.build(Statement, {}, source="stated")
    facts = gather_facts(str(first), statement, "stated", step)
    checkpoint = first / "checkpoints" / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    try:
        for source in facts.sources:
            counts = count_by_document(first, source.name, step)
            assert source.served_tokens == sum(counts.values()) > 0
    finally:
        checkpoint.rmdir()
    assert facts.steps == step
    with pytest.raises(PlanError, match="no weights of step 41"):
        gather_facts(str(first), statement, "stated", 41)


def invoke(*words: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["summary", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.stdout


def test_the_page_answers_from_run_and_statement(run: Path, tmp_path: Path) -> None:
    statement = tmp_path / "stated.yaml"
    statement.write_text(json.dumps(STATED))
    page = invoke(run, "--statement", statement)
    web, _ = gather(run).sources
    assert web.languages is not None
    tokens = web.languages.tokens["en"]
    assert f"| en | {tokens:,} | " in page
    assert "| Less than 1 billion tokens |" in page
    assert "| stream.example | " in page.split("most relevant domain names crawled")[1]
    assert "| Provider name | Mill Ltd |" in page
    assert "state `model.placed_on_market`" in page and "state `sources.web.purposes`" in page
    assert "| Were crawlers used by the provider or on behalf of? | Yes |" in page
    assert "used to train the model? | No |" in page.split("2.4 User data")[1]
    assert "| Open code | " in page and "MIT; Apache-2.0" in page
    data = json.loads(invoke(run, "--statement", statement, "--json"))
    missing = [
        answer["missing"]
        for section in data["sections"]
        for answer in section["answers"]
        if "missing" in answer
    ]
    assert data["missing"] == len(missing) == page.count("Not stated: ") > 0
    out = tmp_path / "page.html"
    invoke(run, "--statement", statement, "--out", out)
    assert "<td>Mill Ltd</td>" in out.read_text()


def test_no_is_only_said_when_every_source_has_a_category(run: Path) -> None:
    page = invoke(run)
    assert "| No |" not in page
    assert "state `category` of the sources web, code" in page


def test_a_lost_dataset_is_counted_by_plan_and_ledger(run: Path, tmp_path: Path) -> None:
    whole = gather(run).sources[0]
    (run.parent / "web").rename(tmp_path / "web")
    try:
        lost = gather(run).sources[0]
        assert "| documents of web | not counted: no dataset at" in invoke(run)
    finally:
        (tmp_path / "web").rename(run.parent / "web")
    assert lost.served_tokens == whole.served_tokens
    assert lost.distinct_tokens == whole.distinct_tokens
    assert lost.tally is None and "no dataset at" in str(lost.problem)


def test_a_first_statement_is_one(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    invoke(run, "--new-statement", file)
    assert file.read_text() == render_statement(["web", "code"])
    statement = config.load(Statement, file)
    assert list(statement.sources) == ["web", "code"]
    assert invoke(run, "--statement", file) == invoke(run)
    invoke(run, "--new-statement", file, code=2)  # it exists


@pytest.mark.parametrize(
    ("stated", "listed"),
    [
        ({}, 4000),
        ({"provider": {"sme": True}}, 1000),
        ({"thresholds": {"max_domains": 10}}, 10),
        ({"provider": {"sme": True}, "thresholds": {"domains": 0.01}}, 400),
    ],
)
def test_the_law_asks_for_a_tenth_of_the_domain_names(stated: Any, listed: int) -> None:
    assert config.build(Statement, stated, source="stated").count_listed_domains(40_000) == listed


def test_wrong_statements_are_named(run: Path) -> None:
    for stated, words in (
        ({"sources": {"wbe": {}}}, "the run has no such source; it has web, code"),
        ({"sources": {"web": {"crawlers": ["bot"]}}}, "belongs to a source of the category"),
        ({"thresholds": {"domains": 2}}, "a share between 0 and 1"),
        ({"providr": {}}, "providr"),
    ):
        with pytest.raises(ConfigError, match=words):
            gather(run, stated)


def test_inventories_fit_their_schemas(run: Path, tmp_path: Path) -> None:
    """The reference libraries read them; a changed document fails."""
    statement = tmp_path / "stated.yaml"
    statement.write_text(json.dumps(STATED))
    texts = {
        template: invoke(run, "--template", template, "--statement", statement)
        for template in ("croissant", "cyclonedx", "spdx")
    }
    check_cyclonedx(texts["cyclonedx"])
    check_croissant(texts["croissant"], tmp_path / "croissant.json")
    check_spdx(texts["spdx"], tmp_path / "spdx.json")


def check_cyclonedx(text: str) -> None:
    from cyclonedx.model.bom import Bom
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"data"', '"dta"')) is not None
    bom = Bom.from_json(json.loads(text))  # type: ignore[attr-defined]
    assert {component.name for component in bom.components} == {"web", "Open code"}


def check_croissant(text: str, file: Path) -> None:
    import mlcroissant

    file.write_text(text)
    metadata = mlcroissant.Dataset(file).metadata
    assert not metadata.issues.errors
    assert {entry.name for entry in metadata.distribution} == {
        "web/manifest",
        "web/shards",
        "code/manifest",
        "code/shards",
    }
    file.write_text(text.replace("contentUrl", "contentUri"))
    with pytest.raises(mlcroissant.ValidationError):
        mlcroissant.Dataset(file)


def check_spdx(text: str, file: Path) -> None:
    from spdx_python_model import v3_0_1 as spdx

    def read(document: str) -> Any:
        objects = spdx.SHACLObjectSet()
        file.write_text(document)
        with file.open("rb") as opened:
            spdx.JSONLDDeserializer().read(opened, objects)
        return objects

    objects = read(text)
    (model,) = objects.foreach_type(spdx.ai_AIPackage)
    (trained,) = (
        relationship
        for relationship in objects.foreach_type(spdx.Relationship)
        if relationship.relationshipType == spdx.RelationshipType.trainedOn
    )
    assert trained.from_ is model
    assert {dataset.name for dataset in trained.to} == {"web", "Open code"}
    assert not objects.missing_ids
    with pytest.raises(Exception, match="txt"):
        read(text.replace('"text"', '"txt"'))


@given(
    hypothesis_numpy.arrays(
        np.int64, st.tuples(st.integers(0, 8), st.just(2)), elements=st.integers(0, 30)
    ),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_overlapping_spans_are_counted_token_by_token(
    spans: np.ndarray, start: int, length: int
) -> None:
    spans.sort(axis=1)
    served = ServedTokens.from_spans(spans)
    counts = Counter(token for low, high in spans.tolist() for token in range(low, high))
    inside = [counts[token] for token in range(start, start + length)]
    bounds = np.array([start]), np.array([start + length])
    assert served.count(*bounds) == sum(inside)
    assert served.count_distinct(*bounds) == sum(count > 0 for count in inside)
