"""Rank the documents of a run by loss, beside that of their source at that time.

    documents.jsonl ─ pieces ─► loss − source's loss, × √tokens ─► the worst pieces ─► documents

The source's loss is the median of its means in the steps around, because a document may be most of
its source in a step.
A mean over n tokens scatters by 1/√n, so a short piece must lie further away than a long one. The
lines stream; only the worst pieces are kept, and their documents are looked up in the plan.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, islice
from statistics import median
from typing import Any

import numpy as np

from ...console.errors import RunError, UserError
from ...console.log import get_logger
from ...dataplane.runlog import document_losses, ledger
from ...dataplane.runlog.document_losses import PieceLoss
from ...dataplane.runlog.reader import METRICS, StepLines
from ...dataplane.storage import storage
from ...mixtures.audit.audit_rows import DocumentInRow
from ...mixtures.audit.auditor import Auditor
from ...mixtures.planning.open_plan import open_plan

log = get_logger(__name__)

MIN_KEPT, KEPT_PER_DOCUMENT = 1000, 20
"""Pieces kept: at least so many, and so many for each document that is asked for."""
BLOCK_STEPS = 512
"""Steps whose rows are located together."""
AROUND = 4
"""Steps before and after a step in which its sources' losses are compared."""
SOURCE = "source"


@dataclass(frozen=True)
class RankedPiece:
    """A recorded piece beside its source."""

    step: int
    source: str
    piece: PieceLoss
    source_loss: float
    """Loss of the source around the step."""

    @property
    def excess(self) -> float:
        """Loss above the source's; infinite if it is not finite."""
        excess = self.piece.loss / self.piece.weight - self.source_loss
        return excess if math.isfinite(excess) else math.inf

    @property
    def score(self) -> float:
        return self.excess * math.sqrt(self.piece.weight)


@dataclass
class RankedDocument:
    """A document, by its worst piece."""

    worst: RankedPiece
    document: DocumentInRow | None
    """None if the plan's datasets cannot be read."""
    steps: set[int] = field(default_factory=set)
    """Steps with pieces among the worst."""
    applied: bool = True
    """False if the weights do not hold the step: it was skipped, or rolled back."""

    def json_data(self) -> dict[str, Any]:
        worst, document = self.worst, self.document
        loss = worst.piece.loss / worst.piece.weight
        return {
            "source": worst.source,
            "document": document and document.document,
            "id": document and document.id,
            "file": document and document.file,
            "position": document and document.position,
            "fields": document and document.fields,
            "loss": loss if math.isfinite(loss) else None,
            "source_loss": worst.source_loss if math.isfinite(worst.source_loss) else None,
            "tokens": worst.piece.weight,
            "step": worst.step,
            "row": worst.piece.row,
            "first": worst.piece.first,
            "steps": len(self.steps),
            "applied": self.applied,
        }


@dataclass
class DocumentGroup:
    """Documents with the same source, or the same value of a field."""

    key: str
    documents: list[RankedDocument] = field(default_factory=list)

    def json_data(self) -> dict[str, Any]:
        excess = [document.worst.excess for document in self.documents]
        mean = sum(excess) / len(excess)
        return {
            "group": self.key,
            "documents": len(self.documents),
            "excess": mean if math.isfinite(mean) else None,
            "worst": self.documents[0].json_data(),
        }


def rank_documents(run: str, max_documents: int) -> list[RankedDocument]:
    """Return the documents of a run's worst pieces, the worst first: `max_documents` or more."""
    file = storage.join(run, document_losses.NAME)
    opened = open_plan(run)
    if not storage.exists(file):
        raise RunError(
            f"the run {run} has recorded no losses of documents",
            hint="a run records them from its next start on",
        )
    auditor = Auditor(opened)
    num_kept = max(MIN_KEPT, KEPT_PER_DOCUMENT * max_documents)
    skipped = list(ledger.find_skipped(opened.ledger)) if opened.ledger else []
    documents: dict[tuple[Any, ...], RankedDocument] = {}
    unread: dict[str, str] = {}
    for piece in _keep_worst(_pieces(run, file, auditor), num_kept):
        document = None
        if piece.source not in unread:
            try:
                document = _find_document(auditor, piece.piece)
            except UserError as error:
                unread[piece.source] = error.message
        place = (piece.piece.row, piece.piece.first) if document is None else document.document
        applied = not any(first <= piece.step < end for first, end in skipped)
        ranked = RankedDocument(piece, document, applied=applied)
        documents.setdefault((piece.source, place), ranked).steps.add(piece.step)
    for source, problem in unread.items():
        log.warning("the documents of %s have rows and no names: %s", source, problem)
    return list(documents.values())


def group_documents(documents: Iterable[RankedDocument], key: str) -> list[DocumentGroup]:
    """Group ranked documents by `source` or by a kept field, the largest group first."""
    groups: dict[str, DocumentGroup] = {}
    fields: set[str] = set()
    for ranked in documents:
        kept = (ranked.document and ranked.document.fields) or {}
        fields |= kept.keys()
        value = ranked.worst.source if key == SOURCE else kept.get(key)
        if value is not None:
            groups.setdefault(str(value), DocumentGroup(str(value))).documents.append(ranked)
    if not groups:
        known = ", ".join(sorted(fields)) or "none"
        raise RunError(
            f"no document among the worst has the field {key}",
            hint=f"--by source, or a kept field ({known}): `tokenize build --keep {key}` keeps it",
        )
    return sorted(groups.values(), key=lambda group: -len(group.documents))


def _pieces(run: str, file: str, auditor: Auditor) -> Iterator[RankedPiece]:
    """Yield the recorded pieces of all steps beside their sources."""
    names = [source.name for source in auditor.plan.sources]
    first_row, assignment = auditor.plan.first_row, auditor.reader.stream.assignment
    steps = document_losses.read_steps(file)
    while block := list(islice(steps, BLOCK_STEPS)):
        rows = np.unique([piece.row for step in block for piece in step.pieces])
        numbers, _ = assignment.locate(rows.astype(np.int64) - first_row)
        sources = dict(zip(rows.tolist(), numbers.tolist(), strict=True))
        means = SourceMeans.read(run, block[0].step, block[-1].step)
        for step in block:
            for piece in step.pieces:
                source = names[sources[piece.row]]
                yield RankedPiece(step.step, source, piece, means.around(source, step.step))


class SourceMeans:
    """The losses of sources in consecutive steps."""

    def __init__(self) -> None:
        self.steps: defaultdict[str, list[int]] = defaultdict(list)
        self.means: defaultdict[str, list[float]] = defaultdict(list)

    @classmethod
    def read(cls, run: str, first: int, last: int) -> SourceMeans:
        """Read the steps [first, last], and those around."""
        means = cls()
        with StepLines(storage.join(run, METRICS)) as lines:
            for line in lines.between(first - AROUND, last + AROUND + 1):
                for name, source in line["sources"].items():
                    if source["loss"] is not None:
                        means.steps[name].append(line["step"])
                        means.means[name].append(source["loss"])
        return means

    @cache  # noqa: B019, an object lives for a block of steps
    def around(self, source: str, step: int) -> float:
        """Return a source's median around a step; NaN if it has no loss there."""
        steps = self.steps[source]
        first, end = bisect_left(steps, step - AROUND), bisect_right(steps, step + AROUND)
        return median(self.means[source][first:end]) if first < end else math.nan


def _keep_worst(pieces: Iterable[RankedPiece], num_kept: int) -> Sequence[RankedPiece]:
    """Return the pieces with the highest scores, the highest first."""
    numbers = count()
    heap: list[tuple[float, int, RankedPiece]] = []
    for piece in pieces:
        entry = (piece.score, -next(numbers), piece)  # of equal scores, the earliest
        if len(heap) < num_kept:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)
    return [piece for *_, piece in sorted(heap, reverse=True)]


def _find_document(auditor: Auditor, piece: PieceLoss) -> DocumentInRow:
    return next(
        document
        for document in auditor.documents(piece.row)
        if document.at <= piece.first < document.at + document.tokens
    )
