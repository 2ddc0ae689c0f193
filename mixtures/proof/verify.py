"""Check a proof with the run's plan and ledger and the dataset's manifest and tables, no shard.

What is checked, in this order:

- the ledger and the plan are those of the commitment, which the reader trusts or not, and the
  ledger has the decisions;
- the dataset's manifest is the plan's, its tables are the manifest's, and the proof's chunks are
  the tables': so the document is at the tokens that the chunks say;
- the order puts these tokens into the rows of the proof, and into no other row up to its step;
- the digests of the rows in these steps lead from the ledger's hash before a step to that after it.
"""

from __future__ import annotations

import json
from typing import Any

from ...console.errors import IntegrityError
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.order.plan import Plan
from ...dataplane.order.stream import Stream
from ...dataplane.runlog import ledger
from ...dataplane.runlog.decisions import PLAN, load_run_plan
from ...dataplane.storage import storage
from ..exposure.lineage import ServedRows
from ..exposure.request import NUMBER, Match
from .chunks import ProvenDataset
from .proof import DocumentProof, ProvenStep, answer_document


def verify_proof(
    proof: DocumentProof,
    *,
    run: str | None = None,
    data: str | None = None,
    trusted: str | None = None,
) -> None:
    """Check a proof; raise IntegrityError if it does not hold.

    `run` is a folder with the plan and the ledger, `data` a URL with the manifest and the tables.
    `trusted` is the proof's commitment, or that of the whole ledger.
    """
    run = proof.run if run is None else run
    plan, file = load_run_plan(run), storage.join(run, ledger.NAME)
    _, newest = ledger.find_entries(file, proof.step)
    if newest is None:
        raise IntegrityError(f"the ledger has no step {proof.step:,}", where=file)
    if plan.hash != proof.plan:
        raise IntegrityError("the proof is of another plan", where=storage.join(run, PLAN))
    if ledger.commit(file, plan.learnt_hash, proof.step) != proof.commitment:
        raise IntegrityError("the proof is of another ledger", where=file)
    last = ledger.read_last(file)
    assert last is not None
    if trusted not in (None, proof.commitment, ledger.commit(file, plan.learnt_hash, last.step)):
        raise IntegrityError(
            f"the proof holds for the commitment {proof.commitment}, not for {trusted}"
        )
    _check_decisions(plan, file, proof.step)
    served = ServedRows(proof.run, Stream(plan), newest.end_row, newest.end_row, file)
    _check_answer(proof, served, proof.data if data is None else data)
    proven_steps = [step.step for step in proof.steps]
    if proven_steps != sorted({exposure["step"] for exposure in proof.answer["exposures"]}):
        raise IntegrityError("the proof does not have the digests of each step once, in order")
    for step in proof.steps:
        _check_step(plan, file, step)


def _check_decisions(plan: Plan, file: str, last_step: int) -> None:
    """Check that the ledger's lines have the decisions that the order follows: the commitment
    covers the lines, not the file of decisions."""
    followed = set(ledger.find_decisions(file))
    for decision in plan.decisions:
        step = plan.step_at(decision.row).number
        if step <= last_step and (step, decision.digest) not in followed:
            raise IntegrityError(
                f"the ledger does not follow the decision from step {step:,} on", where=file
            )


def _check_answer(proof: DocumentProof, served: ServedRows, url: str) -> None:
    """Compute the answer again from the proof's chunks."""
    answer = proof.answer
    sources = {source.name: source for source in served.plan.sources}
    source = sources.get(str(answer["source"]))
    if source is None:
        raise IntegrityError(f"the plan has no source {answer['source']}")
    dataset = ProvenDataset(url, proof.chunks, generations=source.generations)
    if dataset.hash != source.dataset:
        raise IntegrityError("the dataset is not the plan's", where=url)
    _check_tables(dataset)
    number, asked = answer["document"], answer["asked"]
    if type(number) is not int or not 0 <= number < int(dataset.shard_documents[-1]):
        raise IntegrityError(f"the dataset has no document {number!r:.200}", where=url)
    origin = dataset.origins(number, number + 1)[0]
    if asked not in (origin.id, f"{NUMBER}{number}"):
        raise IntegrityError(
            f"the proof answers for {asked!r:.200}, and is about document {number}"
        )
    match = Match(number, asked, origin)
    computed = _drop_place(
        answer_document(served, proof.run, source.name, dataset, match).json_data()
    )
    answer = _drop_place(answer)
    for name in {**computed, **answer}:
        if _encode(computed.get(name)) != _encode(answer.get(name)):
            raise IntegrityError(
                f"the document's {name} in the proof is {answer.get(name)!r:.200}; by the plan and "
                f"the tables it is {computed.get(name)!r:.200}"
            )


def _encode(value: Any) -> str:
    """Return JSON, in which 1 and 1.0 differ."""
    return json.dumps(value, sort_keys=True)


def _drop_place(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without the URL of the dataset below a view: that of published files is
    another. The hash of the view names the dataset."""
    view = answer.get("view")
    if not isinstance(view, dict):
        return answer
    return {**answer, "view": {name: view[name] for name in view if name != "dataset"}}


def _check_tables(dataset: Dataset) -> None:
    """Check that a file's name, which is its hash, is that of the chain in the manifest."""
    for generation in dataset.generations:
        if generation.table.split("/")[-1].split(".")[0] != generation.table_hash[:32]:
            raise IntegrityError("a table of shards is not the manifest's", where=generation.table)


def _check_step(plan: Plan, file: str, proven: ProvenStep) -> None:
    """Check that the digests lead to the ledger's hash after the step."""
    planned = plan.step(proven.step)
    before, entry = ledger.find_entries(file, proven.step)
    is_first = proven.step == plan.first_step
    expected = before.hash if before is not None else plan.hash
    if before is None and (not is_first or plan.parent is not None):
        expected = proven.before  # the line before is in the ledger of the run that is continued
    digests, decided = bytes.fromhex(proven.digests), plan.decision_digest(planned.first_row)
    if (
        entry is None
        or (entry.first_row, entry.rows) != (planned.first_row, planned.rows)
        or len(digests) != planned.rows * ledger.DIGEST_BYTES
        or proven.before != expected
        or ledger.roll(proven.before, decided + digests) != entry.hash
    ):
        raise IntegrityError(
            f"the digests of step {proven.step:,} do not lead to its hash in the ledger", where=file
        )
