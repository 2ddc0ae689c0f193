"""Held-out rows of every kind of source: splits, packed views, other views."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.configs import CONFIGS
from support.data.corpora import texts, write_jsonl
from support.data.small_data import plan_of

from headrace.dataplane.order.plan import Plan
from headrace.reports.board.byte_sizes import measure
from headrace.tokenize.cli import main as tokenize
from headrace.trainer.cli import main as trainer
from headrace.trainer.loop.config import EvaluateConfig
from headrace.trainer.loop.evaluate import distinct_datasets, find_held_out, unnamed_sources
from headrace.trainer.loop.evaluate import plan_held_out as held_out_plan

TINY = CONFIGS / "tiny.yaml"
SOURCES = {
    "code": "code/train",
    "packed": "code/train/packed-32",
    "few": "code/train/few",
    "view": "view",
    "bare": "bare",
}


def run(*words: object) -> None:
    done = CliRunner().invoke(tokenize, list(map(str, words)))
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with a split, both packed; views of it, one of which its split has too."""
    root = tmp_path_factory.mktemp("data")
    corpus = write_jsonl(root / "code.jsonl", texts(80))
    options = ["--tokenizer", "byte", "--workers", 1, "--out"]
    run("build", corpus, "--split", "val=0.2", "--pack", 32, *options, root / "code")
    run("build", write_jsonl(root / "bare.jsonl", texts(20, seed=1)), *options, root / "bare")
    for split in ("train", "val"):
        where = ["--where", "document < 8", "--out", root / "code" / split / "few"]
        run("select", root / "code" / split, *where)
    run("select", root / "code/train", "--where", "document < 9", "--out", root / "view")
    return root


def planned(data: Path, seq_len: int, *names: str) -> Plan:
    sources = {name: {"data": str(data / SOURCES[name]), "max_epochs": 99} for name in names}
    weights = {name: 1 / len(names) for name in names}
    phase = {"tokens": 20 * seq_len, "seq_len": seq_len, "batch": 2 * seq_len, "weights": weights}
    return plan_of({"sources": sources, "phases": {"main": phase}})


def evaluated(plan: Plan, data: Path) -> dict[str, str]:
    sources = held_out_plan(EvaluateConfig(), plan).sources
    return {source.name: str(Path(source.url).relative_to(data)) for source in sources}


def test_packed_sources_and_views_have_held_out_rows(data: Path) -> None:
    names = ("code", "packed", "few", "bare")
    plan = planned(data, 64, *names, "view")
    result = {"code": "code/val", "packed": "code/val/packed-32", "few": "code/val/few"}
    assert evaluated(plan, data) == result
    urls = {name: str(data / url) for name, url in result.items()}
    assert unnamed_sources(EvaluateConfig(), plan, urls) == {"bare": None, "view": "code"}
    assert unnamed_sources(EvaluateConfig(sources=urls), plan, urls) == {}, "people have named them"
    twice = {"view": urls["code"], **urls}
    assert list(distinct_datasets(twice)) == ["view", "packed", "few"], (
        "of two candidates of an anneal"
    )


def test_a_view_has_the_rows_of_its_dataset(data: Path) -> None:
    assert evaluated(planned(data, 64, "view", "bare"), data) == {"view": "code/val"}
    # Rows that bins do not fill: the same documents, not packed.
    assert find_held_out(str(data / "code/train/packed-32"), "val", 48) == str(data / "code/val")
    assert find_held_out(str(data / "code/train/few"), "test", 64) is None
    assert find_held_out(str(data / "bare"), "val", 64) is None


def test_padding_has_no_part_in_the_bytes_of_a_token(data: Path) -> None:
    run("pack", data / "code/val", "--length", 4096, "--out", data / "loose")
    whole = measure(str(data / "code/val"))
    assert measure(str(data / "loose")) == pytest.approx(whole, rel=1e-12)


def test_a_dry_run_and_a_start_name_the_sources_without_rows(data: Path, tmp_path: Path) -> None:
    mixture = tmp_path / "mixture.yaml"
    names = ("code", "view", "bare")
    sources = {name: {"data": str(data / SOURCES[name]), "max_epochs": 99} for name in names}
    row = {"tokens": 1280, "seq_len": 64, "batch": 128}
    phase = {**row, "weights": {"code": 0.5, "view": 0.25, "bare": 0.25}}
    mixture.write_text(json.dumps({"sources": sources, "phases": {"main": phase}}))
    words = ["run", "--mixture", mixture, "--model", TINY, "model.vocab_size=257"]
    words += ["--out", tmp_path / "run", "evaluate.every=4", "--dry-run"]

    def dry(*more: str) -> Any:
        done = CliRunner().invoke(trainer, [*map(str, words), *more])
        assert done.exit_code == 0, done.output
        return done

    result = json.loads(dry("--json").stdout)
    assert {name: source.get("rows_of", "own") for name, source in result["held_out"].items()} == {
        "code": "own", "view": "code", "bare": None,
    }  # fmt: skip
    [warning] = result["warnings"]
    assert warning.startswith("no held-out rows of bare: there is no `val` beside its dataset")
    text = dry().output
    assert "held out     view: as code" in text and f"warning      {warning}" in text
    assert "held out" not in CliRunner().invoke(trainer, [*map(str, words), "evaluate=null"]).output
