"""Name the documents whose losses a run recorded in a step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...dataplane.runlog import document_losses
from ...dataplane.runlog.document_losses import PieceLoss, RecordedPieces
from ...dataplane.shards.documents import format_place
from ...dataplane.storage import storage
from .audit_rows import AuditedRow, DocumentInRow, RecordedLoss, format_id


@dataclass(frozen=True, kw_only=True)
class DocumentShare:
    """A document's part of a step's loss; fields are keys of the JSON."""

    source: str
    document: int
    id: str | None
    file: str
    position: int
    rows: tuple[int, ...]
    """Rows with recorded pieces."""
    tokens: float
    """Σ w over these pieces."""
    loss: float | None
    """Mean over these pieces; None if it is not finite."""
    share: float | None

    def format_text(self) -> str:
        recorded = RecordedLoss(loss=self.loss, share=self.share)
        rows = ", ".join(f"{row:,}" for row in self.rows)
        return (
            f"{recorded.format_text()}: {self.source}, document {self.document:,}"
            f"{format_id(self.id)}, {format_place(self.file, self.position)}, "
            f"row{'s' if len(self.rows) > 1 else ''} {rows}"
        )

    def json_data(self) -> dict[str, Any]:
        return {**vars(self), "rows": list(self.rows)}


def find_recorded(run: str, step: int) -> RecordedPieces | None:
    """Return the pieces that a run recorded for a step; None if there are none."""
    return document_losses.find_step(storage.join(run, document_losses.NAME), step)


def add_losses(rows: Iterable[AuditedRow], recorded: RecordedPieces) -> list[AuditedRow]:
    """Add the recorded losses to the documents of a step's rows."""
    pieces = {(piece.row, piece.first): piece for piece in recorded.pieces}

    def add(row: AuditedRow, document: DocumentInRow) -> DocumentInRow:
        piece = pieces.get((row.row, document.at))
        return document if piece is None else replace(document, recorded=_loss(recorded, [piece]))

    return [
        replace(row, documents=tuple(add(row, document) for document in row.documents))
        for row in rows
    ]


def list_shares(rows: Iterable[AuditedRow], recorded: RecordedPieces) -> list[DocumentShare]:
    """Return the documents of a step's rows that have recorded pieces, the largest share first."""
    documents: dict[tuple[str, int], DocumentInRow] = {}
    pieces: defaultdict[tuple[str, int], list[PieceLoss]] = defaultdict(list)
    by_place = {(piece.row, piece.first): piece for piece in recorded.pieces}
    for row in rows:
        for document in row.documents:
            piece = by_place.get((row.row, document.at))
            if piece is not None:
                key = row.source, document.document
                documents.setdefault(key, document)
                pieces[key].append(piece)
    shares = [
        DocumentShare(
            source=source,
            document=document.document,
            id=document.id,
            file=document.file,
            position=document.position,
            rows=tuple(dict.fromkeys(piece.row for piece in pieces[source, document.document])),
            tokens=sum(piece.weight for piece in pieces[source, document.document]),
            **vars(_loss(recorded, pieces[source, document.document])),
        )
        for (source, _), document in documents.items()
    ]
    return sorted(
        shares,
        key=lambda share: -math.inf if share.loss is None else -share.loss * share.tokens,
    )


def _loss(recorded: RecordedPieces, pieces: Sequence[PieceLoss]) -> RecordedLoss:
    loss = sum(piece.loss for piece in pieces)
    mean = loss / sum(piece.weight for piece in pieces)
    share = loss / recorded.loss if recorded.loss else math.nan
    return RecordedLoss(loss=_finite(mean), share=_finite(share))


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
