"""Proofs as a third party checks them: with a plan, a ledger, a manifest and tables, no shard."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.data.packed_data import packed
from support.data.small_data import plan_of, random_documents, write_dataset

from headrace.console.errors import IntegrityError, PlanError
from headrace.dataplane.loader.rows import RowReader
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream
from headrace.dataplane.runlog.decisions import RecordedDecision, append
from headrace.dataplane.storage.sealed import seal
from headrace.mixtures.cli import main
from headrace.mixtures.proof.proof import DocumentProof, ProvenStep, prove_document
from headrace.mixtures.proof.verify import verify_proof

STEPS = 8


@dataclass
class Published:
    """What a third party has."""

    run: Path
    data: Path
    proof: DocumentProof

    def verify(self, proof: DocumentProof | None = None, *, trusted: str | None = None) -> None:
        run, data = str(self.run), str(self.data)
        verify_proof(proof or self.proof, run=run, data=data, trusted=trusted)


def write_trained(folder: Path, plan: Plan) -> None:
    """Write the plan and the ledger of a run that took STEPS steps."""
    folder.mkdir()
    plan.save(folder / "plan.json")
    reader, rolled, lines = RowReader(plan), plan.hash, []
    for number in range(STEPS):
        step = plan.step(number)
        located = reader.stream.locate(np.arange(step.first_row, step.end_row))
        digests = b"".join(reader.read(reader.find(located)).digests)
        state = hashlib.blake2b(bytes.fromhex(rolled) + digests, digest_size=16)
        rolled = state.hexdigest()
        lines.append(
            {"step": number, "first_row": step.first_row, "rows": step.rows, "hash": rolled}
        )
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def published(tmp_path: Path) -> Published:
    documents = random_documents(1, 120)
    codes = [np.random.default_rng(7).integers(0, 2, len(document)) for document in documents]
    web = tmp_path / "web"
    write_dataset(str(web), documents, shard_documents=40, codes=codes, weight_table=(1.0, 0.0))
    phase = {"tokens": 8_192, "seq_len": 32, "batch": 256, "weights": {"web": 1}}
    plan = plan_of({"chunk": 128, "sources": {"web": {"data": str(web)}}, "phases": {"one": phase}})
    run = tmp_path / "run"
    write_trained(run, plan)
    seen = next(
        proof
        for number in range(120)
        if len((proof := prove_document(str(run), f"id-{number}", None)).steps) > 1
    )
    shutil.rmtree(web / "shards")
    return Published(
        shutil.move(run, tmp_path / "there"), shutil.move(web, tmp_path / "data"), seen
    )


def test_a_proof_holds_without_shards(published: Published, tmp_path: Path) -> None:
    published.verify()
    published.verify(trusted=published.proof.commitment)
    published.proof.save(str(tmp_path / "p.json"))
    assert DocumentProof.load(str(tmp_path / "p.json")).answer == published.proof.answer
    with pytest.raises(IntegrityError, match="holds for the commitment"):
        published.verify(trusted="0" * 64)


def test_an_earlier_checkpoint_is_proved_under_the_published_hash(tmp_path: Path) -> None:
    write_dataset(str(tmp_path / "web"), random_documents(1, 120))
    phase = {"tokens": 8_192, "seq_len": 32, "batch": 256, "weights": {"web": 1}}
    sources = {"web": {"data": str(tmp_path / "web")}}
    plan = plan_of({"chunk": 128, "sources": sources, "phases": {"one": phase}})
    run = str(tmp_path / "run")
    write_trained(Path(run), plan)
    whole = next(
        proof
        for number in range(120)
        if len((proof := prove_document(run, f"id-{number}", None)).steps) > 1
    )
    first, second, *_ = (step.step for step in whole.steps)
    document = whole.answer["asked"]
    absent, present = (prove_document(run, document, None, step) for step in (first, second))
    assert not absent.steps and [step.step for step in present.steps] == [first]
    for proof in (absent, present):
        verify_proof(proof, trusted=whole.commitment)
        verify_proof(proof, trusted=proof.commitment)
        with pytest.raises(IntegrityError, match="not for"):
            verify_proof(proof, trusted=prove_document(run, document, None, 1).commitment[::-1])
    with pytest.raises(PlanError, match=f"no weights of step {STEPS + 1}"):
        prove_document(run, document, None, STEPS + 1)


def moved_row(proof: DocumentProof) -> DocumentProof:
    first, *exposures = proof.answer["exposures"]
    return replace(proof, answer=proof.answer | {"exposures": [first | {"row": 0}, *exposures]})


def with_step(proof: DocumentProof, **changes: object) -> DocumentProof:
    first, *steps = proof.steps
    return replace(proof, steps=(ProvenStep(**(vars(first) | changes)), *steps))  # type: ignore[arg-type]


def flipped_chunk(proof: DocumentProof) -> DocumentProof:
    [(shard, chunks)] = proof.chunks.items()
    damaged = chunks[0].copy()
    damaged[100] ^= 1
    return replace(proof, chunks={shard: {**chunks, 0: damaged}})


def without_exposures(proof: DocumentProof) -> DocumentProof:
    return replace(proof, answer=proof.answer | {"exposures": []}, steps=())


FALSE: dict[str, tuple[Callable[[DocumentProof], DocumentProof], str]] = {
    "another row": (moved_row, "the document's exposures in the proof is"),
    "absence": (without_exposures, "the document's exposures in the proof is"),
    "another document": (
        lambda proof: replace(proof, answer=proof.answer | {"id": "id-999"}),
        "the document's id in the proof is",
    ),
    "another question": (
        lambda proof: replace(proof, answer=proof.answer | {"asked": "id-999"}),
        "answers for 'id-999'",
    ),
    "a part that the answer lacks": (
        lambda proof: replace(proof, answer=proof.answer | {"view": {"dataset": "other"}}),
        "the document's view in the proof is",
    ),
    "a document that the dataset lacks": (
        lambda proof: replace(proof, answer=proof.answer | {"document": -1}),
        "has no document -1",
    ),
    "another digest": (
        lambda proof: with_step(proof, digests="0" + proof.steps[0].digests[1:]),
        "do not lead to its hash",
    ),
    "another hash before": (lambda proof: with_step(proof, before="0" * 32), "do not lead"),
    "a step less": (lambda proof: replace(proof, steps=proof.steps[1:]), "each step once"),
    "a step twice": (
        lambda proof: replace(proof, steps=(proof.steps[0], *proof.steps)),
        "each step once",
    ),
    "a source that is no name": (
        lambda proof: replace(proof, answer=proof.answer | {"source": ["web"]}),
        "no source",
    ),
    "a number with a point": (
        lambda proof: replace(
            proof, answer=proof.answer | {"position": float(proof.answer["position"])}
        ),
        "the document's position in the proof is",
    ),
    "another table of documents": (flipped_chunk, "do not match their hash"),
    "no table of documents": (lambda proof: replace(proof, chunks={}), "lacks chunk"),
    "another plan": (lambda proof: replace(proof, plan="0" * 32), "of another plan"),
    "a later step": (lambda proof: replace(proof, step=STEPS), f"no step {STEPS}"),
    "an earlier step": (lambda proof: replace(proof, step=2), "of another ledger"),
}


@pytest.mark.parametrize("name", FALSE)
def test_a_false_proof_fails(published: Published, name: str) -> None:
    change, message = FALSE[name]
    with pytest.raises(IntegrityError, match=message):
        published.verify(change(published.proof))


def test_changed_files_fail(published: Published) -> None:
    ledger = published.run / "ledger.jsonl"
    whole = ledger.read_text()
    lines = whole.splitlines(keepends=True)
    ledger.write_text("".join([lines[0].replace('"hash": "', '"hash": "f'), *lines[1:]]))
    with pytest.raises(IntegrityError, match="of another ledger"):
        published.verify()
    ledger.write_text(whole + lines[-1].replace(f'"step": {STEPS - 1}', f'"step": {STEPS}'))
    published.verify()  # the run went on
    ledger.write_text(whole)
    [table] = (published.data / "tables").iterdir()
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    table.write_bytes(content)
    with pytest.raises(IntegrityError):
        published.verify()


def test_a_decision_that_the_ledger_does_not_follow_fails(published: Published) -> None:
    """The commitment covers the ledger: shares that only decisions.jsonl has would give another
    order. A ledger's first line may begin at a checkpoint; then it names no decision."""
    plan, file = Plan.load(published.run / "plan.json"), published.run / "decisions.jsonl"
    elsewhere = next(n for n in range(1, STEPS) if n not in {s.step for s in published.proof.steps})
    for number, message in ((0, "does not follow the decision"), (elsewhere, "does not follow")):
        row = plan.step(number).first_row
        fields = {"step": number, "row": row, "shares": {"web": 1.0}, "taken": {"web": row}}
        append(file, RecordedDecision.chained(plan.hash, **fields, by="hand", why={}))
        with pytest.raises(IntegrityError, match=f"{message}.*"):
            published.verify()
        if number:
            with pytest.raises(IntegrityError, match=f"from step {number} on that the ledger"):
                prove_document(str(published.run), "id-1", None)
        file.unlink()
    published.verify()


def test_a_sealed_file_that_is_no_proof_is_named(published: Published, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    published.proof.save(str(file))
    data = json.loads(file.read_text())
    del data["seal"]
    first = data["steps"][0]
    for change in (
        {"answer": {}},
        {"step": "7"},
        {"chunks": []},
        {"steps": [first | {"step": "1"}]},
        {"steps": [first | {"digests": "xy"}]},
        {"steps": [first | {"before": 3}]},
    ):
        file.write_bytes(seal({**data, **change}))
        with pytest.raises(IntegrityError, match="is no whole proof"):
            DocumentProof.load(str(file))


def test_absence_is_proved(tmp_path: Path) -> None:
    """A small part of the dataset is served; most documents are in no row."""
    web = tmp_path / "web"
    write_dataset(str(web), random_documents(1, 400), shard_documents=400)
    phase = {"tokens": 2_048, "seq_len": 32, "batch": 256, "weights": {"web": 1}}
    plan = plan_of({"chunk": 128, "sources": {"web": {"data": str(web)}}, "phases": {"one": phase}})
    write_trained(tmp_path / "run", plan)
    out, runner = str(tmp_path / "p.json"), CliRunner()
    for number in range(400):
        words = ["prove", str(tmp_path / "run"), "--document", f"id-{number}", "--out", out]
        result = runner.invoke(main, words)
        assert not result.exit_code, result.output
        if "0 rows through step 7" in result.output:
            break
    shown = runner.invoke(main, ["verify", out])
    assert f"(id-{number}) of web" in shown.output and "in no row, through step 7" in shown.output
    commitment = runner.invoke(main, ["prove", str(tmp_path / "run")]).output.split()[0]
    trusted = runner.invoke(main, ["verify", out, "--trust", commitment, "--json"])
    assert json.loads(trusted.stdout)["is_trusted"]
    assert not json.loads(trusted.stdout)["answer"]["exposures"]


def test_a_proof_of_a_packed_document_holds_at_another_place(tmp_path: Path) -> None:
    """The view names the dataset below it by its URL, which is another there."""
    here, there = tmp_path / "here", tmp_path / "there"
    write_dataset(str(here / "web"), [np.arange(1, 80), *random_documents(1, 20)])
    packed(here / "web", here / "web" / "packed", length=32)
    phase = {"tokens": 512, "seq_len": 32, "batch": 64, "weights": {"web": 1}}
    sources = {"web": {"data": str(here / "web" / "packed"), "max_epochs": 2}}
    write_trained(here / "run", plan_of({"sources": sources, "phases": {"one": phase}}))
    proof = prove_document(str(here / "run"), "number:1", None)
    view = proof.answer["view"]
    shutil.move(here, there)
    run, data = str(there / "run"), str(there / "web" / "packed")
    verify_proof(proof, run=run, data=data)
    for changed in ({**view, "document": view["document"] + 1}, None, {"dataset": view["dataset"]}):
        with pytest.raises(IntegrityError, match="the document's view"):
            verify_proof(
                replace(proof, answer={**proof.answer, "view": changed}), run=run, data=data
            )


def test_what_cannot_be_proved_is_named(published: Published) -> None:
    run = str(published.run)
    plan = Plan.load(published.run / "plan.json")
    assert Stream(plan).locate(np.array([0])).length == 32
    (published.run / "ledger.jsonl").write_text("")
    with pytest.raises(PlanError, match="no ledger with steps"):
        prove_document(run, "id-1", None)
    invoked = CliRunner().invoke(main, ["prove", run, "--document", "id-1"])
    assert invoked.exit_code == 2 and "--document and --out together" in invoked.output
