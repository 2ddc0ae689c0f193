"""The auditor against documents, expected rows and ledgers."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from support.data.plan_data import write_taken_run
from support.data.small_data import plan_of, random_documents, write_dataset

from headrace.console.errors import IntegrityError, PlanError
from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.dataplane.storage import storage
from headrace.dataplane.tokenizers.byte import ByteConfig, ByteTokenizer
from headrace.mixtures.audit.auditor import Auditor
from headrace.mixtures.audit.export import export_rows
from headrace.mixtures.cli import main
from headrace.mixtures.planning.open_plan import OpenedPlan, open_plan

DOCUMENTS = {"web": random_documents(1, 120), "code": random_documents(2, 90, longest=40)}


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    folder = tmp_path_factory.mktemp("data")
    for name, documents in DOCUMENTS.items():
        write_dataset(str(folder / name), documents, shard_documents=40)
    return plan_of(
        {
            "seed": 3,
            "chunk": 128,
            "window": 4,
            "sources": {
                "web": {"data": str(folder / "web")},
                "code": {"data": str(folder / "code"), "max_epochs": 3},
            },
            "phases": {
                "short": {
                    "tokens": 8_192,
                    "seq_len": 32,
                    "batch": 256,
                    "weights": {"web": 0.75, "code": 0.25},
                },
                "long": {"tokens": 4_096, "seq_len": 64, "weights": {"web": 0.5, "code": 0.5}},
            },
        }
    )


def expected_rows(plan: Plan) -> list[dict]:
    """Return the contents of each row, from the documents written one after the other."""
    rows = []
    stream = Stream(plan)
    for phase in plan.phases:
        located = stream.locate(np.arange(phase.first_row, phase.end_row))
        places = zip(
            located.rows.tolist(), located.sources.tolist(), located.epochs.tolist(), strict=True
        )
        for place, (row, source, epoch) in enumerate(places):
            name, spans = plan.sources[source].name, located.spans(place)
            documents = DOCUMENTS[name]
            owner = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
            inputs = [number for start, end in spans for number in range(start, end)]
            tokens = np.concatenate(documents)[[*inputs, spans[-1][1]]]
            digest = hashlib.blake2b(tokens.astype("<u2").tobytes(), digest_size=16).hexdigest()
            rows.append(
                {
                    "row": row,
                    "phase": phase.name,
                    "source": name,
                    "epoch": epoch,
                    "documents": [
                        (item, owner[start:end].tolist().count(item))
                        for start, end in spans
                        for item in sorted(set(owner[start:end].tolist()))
                    ],
                    "tokens_hash": digest,
                }
            )
    return rows


def test_rows_hold_the_expected_documents(plan):
    audited = list(Auditor(OpenedPlan(Stream(plan))).rows(range(plan.first_row, plan.end_row)))
    assert len(audited) == plan.rows
    stream = Stream(plan)
    assert any(stream.locate(np.array([row.row])).pieces for row in audited)
    for row, expected in zip(audited, expected_rows(plan), strict=True):
        data = json.loads(row.format_json())
        assert list(data) == ["row", "phase", "source", "epoch", "documents", "tokens_hash"]
        documents = data.pop("documents")
        listed = [(document["document"], document["tokens"]) for document in documents]
        assert {**data, "documents": listed} == expected
        for document in documents:
            assert document["id"] == f"id-{document['document']}"
            assert document["position"] == document["document"]
            assert document["file"] == "corpus-0.txt"
        assert plan.step_at(row.row).number == row.step


def test_exported_rows_are_those_of_the_audit(plan, tmp_path):
    """Across blocks, row lengths, shards and rows with several spans."""
    auditor = Auditor(OpenedPlan(Stream(plan)))
    rows, out = range(3, plan.end_row), tmp_path / "rows.parquet"
    count = export_rows(auditor.reader, rows, out, block_rows=37)
    exported = pq.read_table(out).to_pylist()
    assert len(exported) == count
    names = ("document", "id", "file", "position", "first", "tokens", "at")
    expected = [
        {
            **{name: getattr(document, name) for name in names},
            **{name: getattr(row, name) for name in ("row", "step", "phase", "source", "epoch")},
        }
        for row in auditor.rows(rows)
        for document in row.documents
    ]
    assert exported == expected


def test_rows_outside_of_the_plan_are_refused(plan):
    auditor = Auditor(OpenedPlan(Stream(plan)))
    for rows in (range(plan.end_row, plan.end_row + 1), range(plan.end_row + 1)):
        with pytest.raises(PlanError, match=f"rows 0 to {plan.end_row}"):
            list(auditor.rows(rows))
    with pytest.raises(PlanError, match=f"steps 0 to {plan.end_step - 1}, not 999"):
        auditor.step(999)


@pytest.fixture
def run(tmp_path: Path, plan: Plan) -> Path:
    """A run that took 10 steps, with a ledger like the trainer's."""
    folder = tmp_path / "run"
    folder.mkdir()
    plan.save(folder / "plan.json")
    rows = expected_rows(plan)
    rolled = plan.hash
    with (folder / "ledger.jsonl").open("w") as file:
        for number in range(10):
            step = plan.step(number)
            state = hashlib.blake2b(bytes.fromhex(rolled), digest_size=16)
            for row in rows[step.first_row : step.first_row + step.rows]:
                state.update(bytes.fromhex(row["tokens_hash"]))
            rolled = state.hexdigest()
            entry = {"step": number, "first_row": step.first_row, "rows": step.rows, "hash": rolled}
            file.write(json.dumps(entry) + "\n")
    return folder


def test_steps_of_a_run_are_proved_by_its_ledger(run, plan):
    auditor = Auditor(open_plan(str(run)))
    for number in range(12):
        step = plan.step(number)
        rows, proved = auditor.step(number)
        assert [row.row for row in rows] == list(range(step.first_row, step.first_row + step.rows))
        assert proved == (number < 10)


@pytest.mark.parametrize("step", [0, 4, 9])
def test_a_changed_ledger_is_an_error(run, step):
    """Negative control: change one digit of the hash, or the rows."""
    file = run / "ledger.jsonl"
    whole = file.read_text().splitlines()
    entry = json.loads(whole[step])
    flipped = "0" if entry["hash"][0] != "0" else "1"
    for changed, message in (
        ({"hash": flipped + entry["hash"][1:]}, "do not match their hash in the ledger"),
        ({"first_row": entry["first_row"] + 1}, "by the ledger, but rows|do not follow those"),
    ):
        lines = list(whole)
        lines[step] = json.dumps({**entry, **changed})
        file.write_text("\n".join(lines) + "\n")
        with pytest.raises(IntegrityError, match=message):
            Auditor(open_plan(str(run))).step(step)


def test_the_first_step_of_a_continuing_run_is_proved_by_the_parent_ledger(run, plan, tmp_path):
    child = plan_of(
        {
            "after": {"run": str(run), "step": 10},
            "phases": {"more": {"tokens": 1_024, "weights": {"code": 1}}},
            "sources": {"code": {"data": plan.sources[1].url, "max_epochs": 9}},
        }
    )
    folder = tmp_path / "child"
    folder.mkdir()
    child.save(folder / "plan.json")
    last = json.loads((run / "ledger.jsonl").read_text().splitlines()[-1])
    rows = list(
        Auditor(OpenedPlan(Stream(child))).rows(range(child.first_row, child.first_row + 8))
    )
    state = hashlib.blake2b(bytes.fromhex(last["hash"]), digest_size=16)
    for row in rows:
        state.update(bytes.fromhex(row.tokens_hash))
    entry = {"step": 10, "first_row": child.first_row, "rows": 8, "hash": state.hexdigest()}
    (folder / "ledger.jsonl").write_text(json.dumps(entry) + "\n")
    _, proved = Auditor(open_plan(str(folder))).step(10)
    assert proved


def test_a_run_on_an_object_store_is_audited(run, tmp_path):
    url = f"memory://{tmp_path.name}/runs/audited"
    for name in ("plan.json", "ledger.jsonl"):
        storage.write(f"{url}/{name}", (run / name).read_bytes())
    here, there = Auditor(open_plan(str(run))), Auditor(open_plan(url))
    assert there.step(3) == here.step(3) and there.step(3)[1]
    with pytest.raises(PlanError, match=r"no plan\.json in the folder memory://"):
        open_plan(f"memory://{tmp_path.name}/runs")


def test_text_of_rows_and_documents(tmp_path):
    url = str(tmp_path / "text")
    words = ["Wasser zum Rad, δῶς μοι πᾶ στῶ", "the headrace", "ends here"]
    tokenizer = ByteTokenizer(ByteConfig())
    documents = [tokenizer.encode([text]).tokens for text in words * 30]
    manifest = write_dataset(url, documents, fingerprint=tokenizer.info.fingerprint)
    manifests.save(url, replace(manifest, tokenizer=tokenizer.info))
    plan = plan_of(
        {
            "sources": {"a": {"data": url}},
            "phases": {"p": {"tokens": 512, "seq_len": 64, "batch": 64, "weights": {"a": 1}}},
        }
    )
    auditor = Auditor(OpenedPlan(Stream(plan)), text=True)
    for row in auditor.rows(range(4)):
        assert row.text is not None
        assert json.loads(row.format_json())["text"] == row.text
        assert row.text.splitlines()[0] in row.format_text()
        for document in row.documents:  # programs count from 0, and people from 1
            assert f", {document.file}:{document.position + 1}" in row.format_text()
            assert document.json_data()["position"] == document.position
        pieces = row.text.split("<|endoftext|>")
        assert all(piece in words for piece in pieces[1:-1]), pieces


def test_text_shows_what_is_not_learnt(tmp_path):
    url = str(tmp_path / "text")
    tokenizer = ByteTokenizer(ByteConfig())
    documents = [np.array([*b"ab\xc3\xa7defgh", 256], np.uint16)] * 40
    codes = [np.array([1, 1, 0, 0, 0, 2, 2, 0, 0, 1])] * 40
    fingerprint = tokenizer.info.fingerprint
    manifest = write_dataset(
        url, documents, codes=codes, weight_table=(1.0, 0.0, 0.1), fingerprint=fingerprint
    )
    manifests.save(url, replace(manifest, tokenizer=tokenizer.info))
    plan = plan_of(
        {
            "chunk": 64,
            "sources": {"a": {"data": url}},
            "phases": {"p": {"tokens": 256, "seq_len": 32, "batch": 32, "weights": {"a": 1}}},
        }
    )
    auditor = Auditor(OpenedPlan(Stream(plan)), text=True)
    for row in auditor.rows(range(8)):
        assert row.bracketed is not None
        assert json.loads(row.format_json())["bracketed"] == row.bracketed
        assert f"| {row.bracketed}" in row.format_text()
        assert re.sub("⟦(0.1:)?|⟧", "", row.bracketed) == row.text
        assert "çd⟦0.1:ef⟧gh⟦<|endoftext|>ab⟧" in row.bracketed


def test_rows_without_their_data_are_told_by_the_plan(tmp_path: Path) -> None:
    write_dataset(str(tmp_path / "web"), random_documents(1, 90))
    phase = {"tokens": 512, "seq_len": 32, "batch": 64, "weights": {"web": 1}}
    spec = {"sources": {"web": {"data": str(tmp_path / "web")}}, "phases": {"one": phase}}
    run = write_taken_run(tmp_path / "run", plan_of(spec), 8)
    words = ["audit", str(run), "--rows", "6:9", "--json"]
    whole = [json.loads(line) for line in CliRunner().invoke(main, words).stdout.splitlines()]
    shutil.rmtree(tmp_path / "web")
    lost = CliRunner().invoke(main, words)
    assert lost.exit_code == 1 and "no dataset at" in lost.stderr
    rows = [json.loads(line) for line in lost.stdout.splitlines()]
    assert [(row["row"], row["source"], row["epoch"]) for row in rows] == [
        (row["row"], row["source"], row["epoch"]) for row in whole
    ]
    assert all(sum(end - start for start, end in row["spans"]) == 32 for row in rows)
    step = CliRunner().invoke(main, ["audit", str(run), "--step", "3"])
    assert step.exit_code == 1 and "row 6 (step 3, phase one): source web, epoch 0" in step.stdout
