"""Audited rows, with their documents, as text and JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ...dataplane.datasets.fields import format_fields
from ...dataplane.shards.documents import format_place


@dataclass(frozen=True, kw_only=True)
class ThroughView:
    """The view between a plan and a document; fields are keys of the JSON."""

    dataset: str
    """URL of the dataset with the tokens."""
    document: int
    """Document number in this dataset."""
    where: str | None
    """Choice of documents in words; None if the view has all."""
    packed: int | None = None
    """Tokens per bin, for a packed view."""
    first: int | None = None
    """For a packed view, the token in this dataset's document where the view's document begins."""

    def json_data(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class RecordedLoss:
    """The loss that a run recorded for a document's piece; fields are keys of the JSON."""

    loss: float | None
    """Mean over the piece's tokens; None if it is not finite."""
    share: float | None
    """Part of the step's loss."""

    def format_text(self) -> str:
        loss = "loss not finite" if self.loss is None else f"loss {self.loss:.4g}"
        return loss if self.share is None else f"{loss}, {self.share:.1%} of the step's"


@dataclass(frozen=True, kw_only=True)
class DocumentInRow:
    """A contiguous piece of a document in a row; fields are keys of the JSON."""

    document: int
    """Document number in the dataset."""
    id: str | None
    file: str
    position: int
    tokens: int
    """Tokens in the piece."""
    first: int
    """First token, counted in the document."""
    at: int
    """First token, counted in the row."""
    fields: dict[str, Any] | None = None
    """Kept fields; None if the dataset keeps none."""
    view: ThroughView | None = None
    """View through which the row was read; None for a dataset with tokens."""
    recorded: RecordedLoss | None = None
    """None if the run has recorded no loss of this piece."""

    def json_data(self) -> dict[str, Any]:
        data = {name: value for name, value in vars(self).items() if value is not None}
        data["id"] = self.id
        if self.view is not None:
            data["view"] = self.view.json_data()
        if self.recorded is not None:
            data |= vars(data.pop("recorded"))
        return data

    def format_text(self) -> str:
        return (
            f"tokens {self.at:,} to {self.at + self.tokens:,}: document "
            f"{self.document:,}{format_id(self.id)}, its tokens {self.first:,} to "
            f"{self.first + self.tokens:,}, {format_place(self.file, self.position)}"
            f"{describe_view(self.view)}{_format_fields(self.fields)}{self._format_loss()}"
        )

    def _format_loss(self) -> str:
        return "" if self.recorded is None else f"; {self.recorded.format_text()}"


@dataclass(frozen=True, kw_only=True)
class AuditedRow:
    """A row: documents, and the hash of the tokens."""

    row: int
    step: int
    phase: str
    source: str
    epoch: int
    documents: tuple[DocumentInRow, ...]
    tokens_hash: str
    text: str | None = None
    bracketed: str | None = None
    """Text with brackets around unlearnt tokens; None without loss weights."""

    def format_json(self) -> str:
        names = ("row", "phase", "source", "epoch", "documents", "tokens_hash")
        data = {name: getattr(self, name) for name in names}
        data["documents"] = [document.json_data() for document in self.documents]
        if self.text is not None:
            data["text"] = self.text
        if self.bracketed is not None:
            data["bracketed"] = self.bracketed
        return json.dumps(data)

    def format_text(self) -> str:
        lines = [
            f"row {self.row:,} (step {self.step:,}, phase {self.phase}): source {self.source}, "
            f"epoch {self.epoch}, tokens {self.tokens_hash}"
        ]
        lines += [f"  {document.format_text()}" for document in self.documents]
        lines += _quote_lines(self.text if self.bracketed is None else self.bracketed)
        return "\n".join(lines)


def _quote_lines(text: str | None) -> list[str]:
    return [] if text is None else [f"  | {line}" for line in text.splitlines()]


def format_id(id: str | None) -> str:
    return "" if id is None else f" ({id})"


def _format_fields(fields: dict[str, Any] | None) -> str:
    return f"; {format_fields(fields)}" if fields else ""


def describe_view(view: ThroughView | None) -> str:
    if view is None:
        return ""
    document = f"document {view.document:,} of {view.dataset}"
    if view.first:
        document = f"from token {view.first:,} of {document}"
    through = [] if view.where is None else [f"through the view {view.where}"]
    packed = [] if view.packed is None else [f"packed to {view.packed:,} tokens"]
    return "; " + ", ".join([document, *through, *packed])
