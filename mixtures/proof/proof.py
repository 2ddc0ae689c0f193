"""The file of a proof, and what makes it.

A proof says in which rows of a run a document stood, and in no other. It carries what a third party
needs beside the run's plan and ledger and the dataset's manifest and tables: the chunks with the
document's entry in its shard, and the digests of all rows in the steps that held it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...console.errors import IntegrityError, PlanError
from ...dataplane.datasets.dataset import Dataset, open_pinned
from ...dataplane.order.plan import PlanSource
from ...dataplane.runlog import ledger
from ...dataplane.runlog.ledger import LedgerEntry
from ...dataplane.storage import storage
from ...dataplane.storage.sealed import seal, unseal
from ..audit.auditor import Auditor
from ..exposure.answers import DocumentAnswer
from ..exposure.find import answer_documents
from ..exposure.lineage import Lineage, ServedRows
from ..exposure.request import Match, parse_request
from ..planning.open_plan import OpenedPlan, open_plan
from .chunks import RecordedDataset, ShardChunks, decode_chunks, encode_chunks

VERSION = 1
ANSWER_KEYS = {"source", "document", "asked", "id", "tokens", "exposures"}
"""Keys of the answer that a reader needs."""


@dataclass(frozen=True, kw_only=True)
class ProvenStep:
    """A step that held the document; fields are keys of the JSON."""

    step: int
    before: str
    """Rolling hash before the step."""
    digests: str
    """Digests of its rows, in order."""

    def __post_init__(self) -> None:
        if type(self.step) is not int:
            raise ValueError(f"step {self.step!r:.80} is no number")
        bytes.fromhex(self.before + self.digests)


@dataclass(frozen=True, kw_only=True)
class DocumentProof:
    """Where a document stood in a run."""

    run: str
    plan: str
    """Hash of the plan."""
    step: int
    """Last step of the ledger that the proof covers."""
    commitment: str
    """Hash of the plan and of the ledger up to this step: what must be trusted."""
    data: str
    """URL of the source's dataset."""
    answer: dict[str, Any]
    """The answer of `mixtures find`, for the run's own rows."""
    steps: tuple[ProvenStep, ...]
    chunks: ShardChunks

    def save(self, file: str) -> int:
        """Write the proof; returns its bytes."""
        data = {
            "version": VERSION,
            **vars(self),
            "steps": [vars(step) for step in self.steps],
            "chunks": encode_chunks(self.chunks),
        }
        content = seal(data)
        storage.write(file, content)
        return len(content)

    @classmethod
    def load(cls, file: str) -> DocumentProof:
        hint = "ask for the proof again"
        data = unseal(file, storage.read(file), hint=hint, version=VERSION)
        try:
            del data["version"]
            proof = cls(
                **{
                    **data,
                    "steps": tuple(ProvenStep(**step) for step in data["steps"]),
                    "chunks": decode_chunks(data["chunks"]),
                }
            )
            if type(proof.step) is not int or not proof.answer.keys() >= ANSWER_KEYS:
                raise ValueError("it lacks the step or a part of the answer")
            return proof
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{file} is no whole proof: {error!r:.200}", hint=hint) from None


def prove_document(
    run: str, document: str, source_name: str | None, step: int | None = None
) -> DocumentProof:
    """Prove where a document stood: an id in the corpus, or `number:N`. `step`: in the rows of the
    weights after so many steps; None: of the newest."""
    opened, newest = open_run(run, step)
    assert opened.ledger is not None
    source, match = _find_document(opened, document, source_name)
    dataset = RecordedDataset(source.url, generations=source.generations)
    served = ServedRows(run, opened.stream, newest.end_row, newest.end_row, opened.ledger)
    answer = answer_document(served, run, source.name, dataset, match)
    auditor = Auditor(opened)
    steps = sorted({exposure.step for exposure in answer.exposures})
    return DocumentProof(
        run=run,
        plan=opened.plan.hash,
        step=newest.step,
        commitment=ledger.commit(opened.ledger, opened.plan.learnt_hash, newest.step),
        data=source.url,
        answer=answer.json_data(),
        steps=tuple(_prove_step(auditor, step) for step in steps),
        chunks=dataset.chunks,
    )


def open_run(run: str, step: int | None = None) -> tuple[OpenedPlan, LedgerEntry]:
    """Open a run that has taken a step; returns the last entry of its ledger, or the last before
    `step`."""
    opened = open_plan(run)
    newest = None if opened.ledger is None else ledger.read_last(opened.ledger)
    if opened.ledger is None or newest is None:
        raise PlanError(f"{run} has no ledger with steps: nothing can be proved of it")
    if step is None:
        return opened, newest
    _, entry = ledger.find_entries(opened.ledger, step - 1)
    if entry is None:
        raise PlanError(
            f"the ledger of {run} has no weights of step {step:,}",
            hint=f"its steps go from {opened.plan.first_step + 1:,} to {newest.step + 1:,}",
        )
    return opened, entry


def answer_document(
    served: ServedRows, run: str, source: str, dataset: Dataset, match: Match
) -> DocumentAnswer:
    """Answer where a document stood in the run's own rows."""
    [answer] = answer_documents(Lineage(run, (served,), ()), source, dataset, [match])
    return answer


def _find_document(
    opened: OpenedPlan, document: str, source_name: str | None
) -> tuple[PlanSource, Match]:
    """Find the only document of this id or number."""

    request = parse_request((document,), ())
    candidates, without_ids = [], []
    for source in opened.plan.sources:
        if source_name not in (None, source.name):
            continue
        dataset = open_pinned(
            source.url, hash=source.dataset, generations=source.generations, name=source.name
        )
        candidates += [(source, match) for match in request.match(dataset)]
        if request.ids and not dataset.has_ids:
            without_ids.append(source.name)
    if len(candidates) != 1:
        places = ", ".join(f"{match.number} of {source.name}" for source, match in candidates)
        raise PlanError(
            f"the sources hold {len(candidates)} documents {document}: {places}"
            if candidates
            else f"no source of the plan has a document {document}",
            hint="a proof is about one document: give --source, or number:N"
            if candidates
            else f"documents of {', '.join(without_ids)} have no ids: ask by number:N"
            if without_ids
            else None,
        )
    return candidates[0]


def _prove_step(auditor: Auditor, number: int) -> ProvenStep:
    rows, proved = auditor.step(number)
    if not proved:
        raise IntegrityError(f"the ledger does not prove step {number:,}")
    return ProvenStep(
        step=number,
        before=auditor.hash_before(number),
        digests="".join(row.tokens_hash for row in rows),
    )
