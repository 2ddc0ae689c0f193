"""Runs of several tokenizers on one axis: bits per byte, or a warning."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data.corpora import ONE, texts, write_jsonl
from support.data.small_data import plan_of
from support.pages.board_runs import SOURCES, STEPS, write_plan, write_run
from support.pages.chromium import Chromium

from headrace.dataplane.order.plan import Plan
from headrace.dataplane.storage.sealed import seal, unseal
from headrace.reports.report.reading.data import RunData
from headrace.reports.report.reading.stored import StoredRun
from headrace.tokenize.builder.build import BuildConfig, build
from headrace.tokenize.sources.format import SourceConfig
from headrace.tokenize.train import TrainConfig, train
from headrace.trainer.folders.folder import RunFolder

LOSSES = ["loss", "loss/web", "loss/code", "held-out/loss", "held-out/loss/web"]


def with_evaluations(run: Path, plan: Plan) -> Path:
    """Name the sources of a run as its held-out datasets."""
    plan.save(run / "held-out-1.json")
    file = run / "about.json"
    about = unseal(str(file), file.read_bytes(), hint="")
    file.write_bytes(seal(about | {"held_out": "held-out-1.json"}))
    return run


def words_plan(folder: Path) -> Plan:
    """Return a plan of the sources of `write_plan` with another tokenizer, in one phase."""
    corpora = [
        write_jsonl(folder / f"{name}.jsonl", texts(150, seed=len(name))) for name in SOURCES
    ]
    path = str(folder / "bpe.json")
    train(TrainConfig(inputs=(str(corpora[0]),), out=path, vocab_size=300))
    for name, corpus in zip(SOURCES, corpora, strict=True):
        config = {"inputs": (str(corpus),), "out": str(folder / name), "tokenizer": path}
        build(BuildConfig(**config, source=SourceConfig(), engine=ONE))
    sources = {name: {"data": str(folder / name), "max_epochs": 9} for name in SOURCES}
    phase = {
        "tokens": STEPS * 256,
        "seq_len": 64,
        "batch": 256,
        "weights": {"web": 0.9, "code": 0.1},
    }
    return plan_of({"seed": 7, "sources": sources, "phases": {"main": phase}})


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two tokenizers; most steps of the second have one of its sources."""
    root = tmp_path_factory.mktemp("units")
    for name, plan in (("byte", write_plan(root, STEPS)), ("words", words_plan(root / "words"))):
        with_evaluations(write_run(root / "runs" / name, plan), plan)
    return root / "runs"


def listed(client: Any) -> dict[str, Any]:
    return {run["name"]: run for run in client.json("api/runs")["runs"]}


def test_losses_are_those_of_the_report(open_board: Any, mixed: Path) -> None:
    client = open_board(mixed)
    assert not any(run["bytes_known"] for run in listed(client).values())
    client.board.measure()
    for name, run in listed(client).items():
        stored = StoredRun.open(RunFolder(mixed / name))
        report = RunData.read(stored, stored.measured_sizes())
        asked = {"run": run["id"], "axis": "step", "width": 1000, "curve": LOSSES}
        steps, held_out = client.curves(**asked, bits=1)
        for part, table in ((steps, report.table), (held_out, report.held_out_table)):
            for curve, values in part["values"].items():
                expected = table.curves[curve.removeprefix("held-out/")]
                assert np.allclose(values, expected, rtol=1e-5, equal_nan=True), curve
        nats, _ = client.curves(**asked)
        assert list(steps["values"]) == LOSSES[:3]
        assert not np.allclose(steps["values"]["loss"], nats["values"]["loss"])
        assert run["bits"] == pytest.approx(steps["values"]["loss"][0][-1], rel=1e-5)
        value = float(steps["values"]["loss"][0][11])
        near = {"curve": "loss", "first": 0, "last": STEPS - 1, "value": value}
        assert client.json(f"api/nearest/{run['id']}", **near, bits=1) == {"step": 11}


def test_a_bucket_has_its_nats_over_its_bytes(open_board: Any, mixed: Path) -> None:
    client = open_board(mixed)
    client.board.measure()
    run = next(run for run in client.board.runs.values() if run.url.endswith("words"))
    entries = [json.loads(line) for line in (mixed / "words/metrics.jsonl").open()]
    [part] = client.curves(run=run.id, axis="step", width=1, curve="loss", bits=1)
    assert part["points"] == 1
    octets = tokens = 0.0
    for entry in entries:
        for name, source in entry["sources"].items():
            octets += source["weight"] * run.sizes.trained[name]
            tokens += source["weight"]
    assert {len(entry["sources"]) for entry in entries} == {1, 2}
    mean = np.mean([entry["loss"] for entry in entries]) / math.log(2) * tokens / octets
    assert part["values"]["loss"][0] == pytest.approx([mean], rel=1e-5)


def test_relative_datasets_are_read_from_another_folder(
    open_board: Any, mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A demo's run is shown from the folder above it, as `mixtures audit` shows its rows."""
    copy = Path(shutil.copytree(mixed, tmp_path / "runs"))
    monkeypatch.chdir(mixed.parent)
    for run in copy.iterdir():
        for file in (run / "plan.json", run / "held-out-1.json"):
            plan = Plan.load(file)
            sources = [
                replace(source, url=str(Path(source.url).relative_to(mixed.parent)))
                for source in plan.sources
            ]
            replace(plan, sources=tuple(sources)).save(file)
    monkeypatch.chdir(tmp_path)
    client = open_board(copy)
    client.board.measure()
    assert [run["bytes_problem"] for run in listed(client).values()] == [None, None]


@pytest.mark.parametrize("about", ["{", '{"held_out": null}'])
def test_held_out_datasets_that_are_not_known_have_a_reason(
    open_board: Any, mixed: Path, tmp_path: Path, about: str
) -> None:
    """Losses of one panel in bits, and of another in nats, would stand under one unit."""
    copy = Path(shutil.copytree(mixed, tmp_path / "runs"))
    (copy / "words/about.json").write_text(about)
    client = open_board(copy)
    client.board.measure()
    words, byte = (listed(client)[name] for name in ("words", "byte"))
    assert not words["bytes_known"] and str(copy / "words") in words["bytes_problem"]
    assert byte["bytes_known"] and byte["bytes_problem"] is None


def test_runs_of_one_tokenizer_are_not_measured(
    open_board: Any, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_board(runs)
    monkeypatch.setattr("headrace.reports.board.byte_sizes.measure", pytest.fail)
    client.board.measure()
    assert {run["bytes_known"] for run in listed(client).values()} == {False}


@pytest.mark.server
@pytest.mark.timeout(900)
def test_the_page_says_its_unit(browser: Chromium, open_board: Any, mixed: Path) -> None:
    client = open_board(mixed)
    browser.device(1440, 950)
    browser.open(client.server.url)
    unit = "return document.querySelector('[data-panel=Loss] h2 small')?.innerText"
    note = "return document.querySelector('#view > .note')?.innerText"
    assert browser.until(unit) == "nats per token, of different tokenizers"
    assert "cannot be compared" in browser.run(note)
    client.board.measure()
    browser.until(f"return (() => {{ {unit} }})() === 'bits per byte'")
    assert "different tokenizers: losses are in bits per byte" in browser.run(note)
    assert (
        browser.run("return document.querySelectorAll('#runs li')[0].innerText").count(
            "bits per byte"
        )
        == 1
    )
    browser.click("#runs input", 1)
    browser.until(f"return (() => {{ {unit} }})() === 'nats per token'")
    assert browser.run(note) is None
    browser.click("#runs input", 1)


@pytest.mark.server
@pytest.mark.timeout(900)
def test_a_missing_dataset_is_named(
    browser: Chromium, open_board: Any, mixed: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(mixed, tmp_path / "runs"))
    plan = Plan.load(copy / "words/plan.json")
    moved = replace(plan.sources[0], url="/nowhere/web")
    replace(plan, sources=(moved, *plan.sources[1:])).save(copy / "words/plan.json")
    client = open_board(copy)
    client.board.measure()
    browser.open(client.server.url)
    note = "return document.querySelector('#view > .note.warning')?.innerText"
    assert "no dataset at /nowhere/web" in browser.until(note)
