"""Cards of datasets, beside counts that are made from the corpus itself."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.data.corpora import ONE, read_dataset, texts

from headrace.console.errors import InputError
from headrace.console.progress import format_bytes
from headrace.dataplane.datasets import about, manifest
from headrace.dataplane.datasets.about import About
from headrace.tokenize.card import card
from headrace.tokenize.cli import main
from headrace.tokenize.corpus.evaluations import EvaluationConfig
from headrace.tokenize.sources.format import KeptField, SourceConfig
from headrace.tokenize.views.pack import PackConfig, pack
from headrace.tokenize.views.select import SelectConfig, select

Run = Callable[..., Path]


@pytest.fixture
def dataset(tmp_path: Path, run_build: Run) -> Path:
    """A dataset of texts with a language and a score, some of them equal."""
    lines = [
        {"text": text, "language": "en" if number % 4 else "de|at", "score": number / 100}
        for number, text in enumerate([*texts(100), *texts(20)])
    ]
    lines[7]["language"] = None
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    keep = (KeptField(name="language"), KeptField(name="score"))
    return run_build(path, dedup="exact", source=SourceConfig(keep=keep))


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """Return the rows of the table below a heading, by their first cell."""
    part = page.split(f"{heading}\n", 1)[1].split("\n## ")[0]
    lines = [
        re.split(r"(?<!\\) \| ", line.strip("| ")) for line in part.splitlines() if "|" in line
    ]
    return {cells[0]: cells[1:] for cells in lines[2:]}


def test_a_card_has_the_counts_of_its_dataset(dataset: Path) -> None:
    page = card(str(dataset))
    held = manifest.load(str(dataset))
    documents = read_dataset(dataset)
    lengths = [len(ids) for _, _, ids in documents]
    totals = rows_of(page, f"# Dataset {dataset.name}")
    assert totals["tokens"] == [f"{sum(lengths):,}"]
    assert totals["documents"] == ["100"]
    assert totals["hash"] == [f"`{held.hash}`"]
    ratio = sum(len(text.encode()) for _, text, _ in documents) / sum(lengths)
    assert totals["bytes of a token"][0].startswith(f"{ratio:.3f} in {sum(lengths):,} tokens")
    median = sorted(lengths)[49]
    assert rows_of(page, "## Lengths")["50%"] == [f"{median:,}"]
    assert rows_of(page, "## Lengths")["100%"] == [f"{max(lengths):,}"]
    assert rows_of(page, "## Left out by the build")["duplicates"] == ["20"]
    size = (dataset.parent / "corpus.jsonl").stat().st_size
    assert totals["built from"] == [f"1 file, {format_bytes(size)} as stored"]
    settings = rows_of(page, "## Settings of the build")
    assert settings["dedup"] == ["`yes`"]
    assert settings["source keep"] == ["`language:string, score:float`"]
    assert settings["tokenizer special tokens"] == ["`<\\|endoftext\\|>`"]
    assert not any(mark in value[0] for value in settings.values() for mark in "[{")


def test_shares_of_fields(dataset: Path) -> None:
    page = card(str(dataset))
    lengths = [len(ids) for _, _, ids in read_dataset(dataset)]
    tokens: Counter[str] = Counter()
    for number, length in enumerate(lengths):
        if number != 7:
            tokens["en" if number % 4 else "de|at"] += length
    shares = rows_of(page, "## Field `language`")
    assert "Missing in 1 of 100 documents" in page
    assert shares["en"] == [f"{74 / 99:.2%}", f"{tokens['en'] / sum(tokens.values()):.2%}"]
    assert shares["de\\|at"][0] == f"{25 / 99:.2%}"
    scores = rows_of(page, "## Field `score`")
    assert float(scores["50%"][0]) == pytest.approx(np.quantile(np.arange(100) / 100, 0.5))


def test_a_card_of_a_view(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "view"
    select(SelectConfig(dataset=str(dataset), where="language == 'en'", out=str(out), engine=ONE))
    page = card(str(out))
    assert rows_of(page, "# Dataset view")["documents"] == ["74"]
    assert rows_of(page, "## Field `language`") == {"en": ["100.00%", "100.00%"]}
    assert rows_of(page, "## Left out by the view") == {"documents not chosen": ["26"]}
    assert rows_of(page, "## Left out by the build of its dataset") == {"duplicates": ["20"]}


def test_cards_of_views_have_the_account_of_their_dataset(tmp_path: Path, run_build: Run) -> None:
    """What is left out adds up to the documents of the corpus, in each view."""
    folder = tmp_path / "c"
    eleven = " ".join(f"asked{n}" for n in range(11))
    lines = [{"text": f"{text} end", "language": "en"} for text in texts(40)]
    lines += [lines[0], {"text": f"so {eleven} is it"}, {"text": ""}, {"text": "no, reject it"}]
    lines += [{"text": 7}, {"text": "long " * 400}]
    lines = [{"language": "en"} | line for line in lines]
    folder.mkdir()
    (folder / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": eleven}) + "\n")
    (tmp_path / "rules.py").write_text(
        "def keep(text, fields):\n    return 'rejected' if 'reject' in text else None\n"
    )
    base = run_build(
        folder,
        dedup="exact",
        on_error="skip",
        source=SourceConfig(keep=(KeptField(name="language"),)),
        filter=f"{tmp_path / 'rules.py'}:keep",
        decontaminate=EvaluationConfig(evaluations=(str(tmp_path / "eval.jsonl"),), ngram=8),
    )
    about.save(str(base), About(licenses=("CC-BY-4.0",), sources=("a crawl",)))
    by_build = {
        "bad: missing field": ["1"],
        "dropped by decontamination": ["1"],
        "dropped by the filter: rejected": ["1"],
        "duplicates": ["1"],
        "empty documents": ["1"],
    }
    page = card(str(base))
    assert "Licences: CC-BY-4.0.  " in page
    assert rows_of(page, "## Left out by the build") == by_build
    assert "documents read" in rows_of(page, "## Other counts of the build")
    assert "Left out by the view" not in page

    urls = {name: str(tmp_path / name) for name in ("short", "first", "packed")}
    select(SelectConfig(dataset=str(base), where="tokens < 1500", out=urls["short"], engine=ONE))
    select(SelectConfig(dataset=urls["short"], where="document < 9", out=urls["first"], engine=ONE))
    pack(PackConfig(dataset=urls["short"], length=60, long="drop", out=urls["packed"], engine=ONE))
    documents = read_dataset(base)
    short = [ids for _, _, ids in documents if len(ids) < 1500]
    longer = sum(len(ids) > 60 for ids in short)
    assert (len(documents), len(short)) == (41, 40) and 0 < longer < 40
    by_view = {
        "short": {"documents not chosen": ["1"]},
        "first": {"documents not chosen": ["32"]},
        "packed": {"documents longer than a bin": [str(longer)], "documents not chosen": ["1"]},
    }
    for name, url in urls.items():
        page = card(url)
        assert "Licences: CC-BY-4.0 (as its dataset states).  " in page
        assert "Sources: a crawl (as its dataset states)." in page
        assert rows_of(page, "## Left out by the build of its dataset") == by_build
        assert rows_of(page, "## Left out by the view") == by_view[name]
    text = sum(len(text.encode()) for _, text, ids in documents if len(ids) <= 60)
    tokens = sum(len(ids) for _, _, ids in documents if len(ids) <= 60)
    bytes_of_token = rows_of(page, "# Dataset packed")["bytes of a token"]
    assert bytes_of_token == [f"{text / tokens:.3f} in {tokens:,} tokens of the sample"]
    assert "Licences: MIT.  " in card(urls["short"], licenses=["MIT"])


def test_licences_are_stated_once(dataset: Path, tmp_path: Path) -> None:
    before = manifest.load(str(dataset)).hash
    assert "Licences: not stated." in card(str(dataset))
    out = tmp_path / "card.md"
    stated = ["--license", "CC-BY-4.0", "--source", "a crawl", "--out", str(out)]
    run = CliRunner().invoke(main, ["card", str(dataset), *stated])
    assert run.exit_code == 0
    assert "Licences: CC-BY-4.0." in out.read_text()
    again = CliRunner().invoke(main, ["card", str(dataset), "--license", "MIT"]).stdout
    assert "Licences: MIT." in again
    assert "Sources: a crawl." in again
    assert manifest.load(str(dataset)).hash == before
    (dataset / "about.json").write_text('{"licenses": "MIT"}')
    with pytest.raises(InputError, match="does not state licences and sources"):
        card(str(dataset))


def test_the_ending_of_the_file_decides(dataset: Path, tmp_path: Path) -> None:
    html = tmp_path / "card.html"
    assert CliRunner().invoke(main, ["card", str(dataset), "--out", str(html)]).exit_code == 0
    assert html.read_text().startswith("<!doctype html>")
    refused = CliRunner().invoke(main, ["card", str(dataset), "--out", str(tmp_path / "card.txt")])
    assert refused.exit_code == 2
    assert "card.txt does not end in .md or .html" in refused.output
    assert not (tmp_path / "card.txt").exists()
