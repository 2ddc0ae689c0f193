"""`trainer documents` finds planted documents, and a resume on other ranks records the same."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from support.data.small_data import END, VOCABULARY, write_dataset
from support.ranks import forked

from headrace.dataplane.runlog import document_losses, ledger
from headrace.mixtures.cli import main as mixtures
from headrace.reports.documents import worst
from headrace.trainer.cli import main as trainer

PLANTED = {4, 23, 41}
MODEL = {
    "vocab_size": VOCABULARY,
    "width": 16,
    "pattern": "attention",
    "mlp": "glu",
    "operators": {
        "attention": {"kind": "attention", "heads": 2},
        "glu": {"kind": "glu", "hidden": 32},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of few ids, and planted ones of any ids in one of the sources."""
    folder = tmp_path_factory.mktemp("documents")
    numbers = np.random.default_rng(5)
    for source, count in (("web", 60), ("code", 30)):
        documents = []
        for number in range(count):
            planted = source == "web" and number in PLANTED
            ids = numbers.integers(1, VOCABULARY if planted else 6, 30 + number % 20)
            documents.append(np.append(ids, END).astype(np.uint16))
        write_dataset(str(folder / source), documents)
    mixture = {
        "sources": {
            name: {"data": str(folder / name), "max_epochs": 9} for name in ("web", "code")
        },
        "phases": {
            "only": {
                "tokens": 6144,
                "seq_len": 32,
                "batch": 256,
                "weights": {"web": 0.75, "code": 0.25},
            }
        },
    }
    (folder / "mixture.yaml").write_text(yaml.safe_dump(mixture))
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
    return folder


def train(folder: Path, name: str, *words: str, code: int = 0) -> Path:
    command = [sys.executable, "-m", "headrace.trainer.cli", "run", "--model"]
    files = [str(folder / "model.yaml"), "--mixture", str(folder / "mixture.yaml")]
    overrides = ["engine.kind=fsdp2", "optimizer.lr=3e-2", "checkpoints.every=8", "threads=1"]
    quiet = ["watch.tensorboard=false", "micro_batch_tokens=128"]
    done = forked.run([*command, *files, "--out", str(folder / name), *overrides, *quiet, *words])
    assert done.returncode == code, done.stderr
    return folder / name


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return train(folder, "run")


def ask(command: Any, *words: str) -> Any:
    done = CliRunner().invoke(command, list(words))
    assert done.exit_code == 0, done.output
    return done


def test_planted_documents_are_the_worst(run: Path) -> None:
    ranked = json.loads(ask(trainer, "documents", str(run), "--worst", "3", "--json").stdout)
    assert {entry["document"] for entry in ranked} == PLANTED
    for entry in ranked:
        assert entry["source"] == "web" and entry["id"] == f"id-{entry['document']}"
        assert entry["loss"] > entry["source_loss"] + 1 and entry["applied"]
    groups = json.loads(ask(trainer, "documents", str(run), "--by", "source", "--json").stdout)
    assert {group["group"] for group in groups} == {"web", "code"}
    refused = CliRunner().invoke(trainer, ["documents", str(run), "--by", "language"])
    assert refused.exit_code == 1 and "has the field language" in refused.output


def test_an_audit_shows_the_documents_shares(run: Path) -> None:
    """The shares of all pieces are those of the recorded sums; a line names the source's place."""
    ranked = json.loads(ask(trainer, "documents", str(run), "--worst", "1", "--json").stdout)[0]
    step = ranked["step"]
    done = ask(mixtures, "audit", str(run), "--step", str(step), "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    recorded = document_losses.find_step(run / document_losses.NAME, step)
    assert recorded is not None
    shown = {
        (row["row"], piece["at"]): piece["share"]
        for row in rows
        for piece in row["documents"]
        if "share" in piece
    }
    listed = {(piece.row, piece.first): piece.loss / recorded.loss for piece in recorded.pieces}
    assert shown == pytest.approx(listed) and len(listed) == 8
    assert f"web, document {ranked['document']} (id-{ranked['document']})" in done.stderr


def test_steps_that_the_weights_do_not_hold_are_marked_and_names_may_be_gone(
    run: Path, folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    lines = [json.loads(line) for line in (copy / ledger.NAME).read_text().splitlines()]
    for line in lines:
        del line["check"]
    lines[-1] |= {"skipped": True, "why": "spike", "back_to": 8}
    (copy / ledger.NAME).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    ranked = worst.rank_documents(str(copy), 3)
    assert {document.worst.step >= 8 for document in ranked} == {True, False}
    for document in ranked:
        assert document.applied == (document.worst.step < 8)
    moved = folder / "web"
    moved.rename(tmp_path / "web")
    try:
        ranked = worst.rank_documents(str(copy), 3)
    finally:
        (tmp_path / "web").rename(moved)
    assert {document.document is None for document in ranked} == {True, False}
    assert ranked[0].document is None and ranked[0].worst.source == "web"
    (copy / document_losses.NAME).unlink()
    refused = CliRunner().invoke(trainer, ["documents", str(copy)])
    assert refused.exit_code == 1 and "has recorded no losses of documents" in refused.output


@pytest.mark.slow
def test_a_killed_run_on_other_ranks_records_the_same(run: Path, folder: Path) -> None:
    """Lines after the checkpoint leave the record, so no step counts twice."""
    train(folder, "two", "--processes", "2", "--stop-after", "11", code=85)
    stopped = folder / "two"
    shutil.rmtree(stopped / "checkpoints" / "step-00000011")  # killed before it was saved
    assert len(list(document_losses.read_steps(stopped / document_losses.NAME))) == 11
    train(folder, "two", "--processes", "2", "layout.cp=2")
    pairs = zip(
        *(document_losses.read_steps(r / document_losses.NAME) for r in (run, stopped)), strict=True
    )
    for ours, theirs in pairs:
        assert ours.step == theirs.step and ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        for piece, their_piece in zip(ours.pieces, theirs.pieces, strict=True):
            assert piece[:2] == their_piece[:2] and piece[2:] == pytest.approx(
                their_piece[2:], rel=1e-4
            )
