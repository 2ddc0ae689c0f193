"""Results of an audit, as text and JSON: rows with their documents, documents with their rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...dataplane.datasets.fields import as_text
from ...dataplane.shards.documents import DocumentOrigin, place_of


@dataclass(frozen=True, kw_only=True)
class ThroughView:
    """The view that a document came through."""

    dataset: str
    """The URL of the dataset that holds the document."""
    document: int
    """Number of the document there."""
    where: str | None
    """The choice of the view in words; None if it has all documents."""
    packed: int | None = None
    """Tokens of a bin, if the view is packed."""
    first: int | None = None
    """If it is packed: the token of the document there with which that of the view begins."""

    def as_data(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class DocumentInRow:
    """The piece of a document that is in a row."""

    document: int
    """Number of the document in the dataset."""
    id: str | None
    file: str
    position: int
    tokens: int
    """Number of the row's tokens that belong to the document."""
    first: int
    """First token of the document that is in the row."""
    at: int
    """Place of that token in the row."""
    fields: dict[str, Any] | None = None
    """The kept fields of the document; None if the dataset keeps none."""
    view: ThroughView | None = None
    """The view that the row was read through; None for a dataset with tokens of its own."""

    def as_data(self) -> dict[str, Any]:
        data = {name: value for name, value in vars(self).items() if value is not None}
        return data | {"id": self.id} | ({} if self.view is None else {"view": self.view.as_data()})

    def as_text(self) -> str:
        return (
            f"tokens {self.at:,} to {self.at + self.tokens:,}: document "
            f"{self.document:,}{_in_brackets(self.id)}, its tokens {self.first:,} to "
            f"{self.first + self.tokens:,}, {place_of(self.file, self.position)}"
            f"{_through(self.view)}{_listed(self.fields)}"
        )


@dataclass(frozen=True, kw_only=True)
class AuditedRow:
    """A row, with its documents and the hash of its tokens."""

    row: int
    step: int
    phase: str
    source: str
    epoch: int
    documents: tuple[DocumentInRow, ...]
    tokens_hash: str
    text: str | None = None
    bracketed: str | None = None
    """The text with brackets around what is not learnt; None if the dataset has no loss weights."""

    def as_json(self) -> str:
        names = ("row", "phase", "source", "epoch", "documents", "tokens_hash")
        data = {name: getattr(self, name) for name in names}
        data["documents"] = [document.as_data() for document in self.documents]
        if self.text is not None:
            data["text"] = self.text
        if self.bracketed is not None:
            data["bracketed"] = self.bracketed
        return json.dumps(data)

    def as_text(self) -> str:
        lines = [
            f"row {self.row:,} (step {self.step:,}, phase {self.phase}): source {self.source}, "
            f"epoch {self.epoch}, tokens {self.tokens_hash}"
        ]
        lines += [f"  {document.as_text()}" for document in self.documents]
        lines += _quoted(self.text if self.bracketed is None else self.bracketed)
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """A row that holds tokens of a document."""

    row: int
    step: int
    phase: str
    epoch: int
    first: int
    """First token of the document that is in the row."""
    tokens: int
    at: int
    """Place of that token in the row."""
    seen: bool | None
    """True if the run has taken this row; None if there is no ledger."""


@dataclass(frozen=True, kw_only=True)
class AuditedDocument:
    """A document, and all rows of the plan that hold its tokens."""

    source: str
    document: int
    origin: DocumentOrigin
    fields: dict[str, Any] | None
    """Its kept fields; None if the dataset keeps none."""
    view: ThroughView | None
    """The view that it is searched through; None for a dataset with tokens of its own."""
    tokens: int
    occurrences: tuple[Occurrence, ...]
    text: str | None = None
    bracketed: str | None = None
    """The text with brackets around what is not learnt; None if the dataset has no loss weights."""

    def as_json(self) -> Iterator[str]:
        origin: dict[str, Any] = {
            "id": self.origin.id,
            "file": self.origin.file,
            "position": self.origin.position,
        }
        if self.fields is not None:
            origin["fields"] = self.fields
        if self.view is not None:
            origin["view"] = self.view.as_data()
        for occurrence in self.occurrences:
            data = {"source": self.source, "document": self.document, **origin, **vars(occurrence)}
            texts = {"text": self.text, "bracketed": self.bracketed}
            data |= {name: text for name, text in texts.items() if text is not None}
            yield json.dumps(data)

    def as_text(self) -> str:
        lines = [
            f"document {self.document:,}{_in_brackets(self.origin.id)} of {self.source}: "
            f"{self.tokens:,} tokens, {place_of(self.origin.file, self.origin.position)}"
            f"{_through(self.view)}{_listed(self.fields)}"
        ]
        status = {True: ", trained on", False: ", not trained on yet", None: ""}
        lines += [
            f"  row {at.row:,} (step {at.step:,}, phase {at.phase}, epoch {at.epoch}"
            f"{status[at.seen]}): tokens {at.first:,} to {at.first + at.tokens:,} of the document, "
            f"at tokens {at.at:,} to {at.at + at.tokens:,} of the row"
            for at in self.occurrences
        ]
        if not self.occurrences:
            lines.append("  no row of this plan holds it")
        lines += _quoted(self.text if self.bracketed is None else self.bracketed)
        return "\n".join(lines)


def _quoted(text: str | None) -> list[str]:
    return [] if text is None else [f"  | {line}" for line in text.splitlines()]


def _in_brackets(id: str | None) -> str:
    return "" if id is None else f" ({id})"


def _listed(fields: dict[str, Any] | None) -> str:
    return f"; {as_text(fields)}" if fields else ""


def _through(view: ThroughView | None) -> str:
    if view is None:
        return ""
    document = f"document {view.document:,} of {view.dataset}"
    if view.first:
        document = f"from token {view.first:,} of {document}"
    through = [] if view.where is None else [f"through the view {view.where}"]
    packed = [] if view.packed is None else [f"packed to {view.packed:,} tokens"]
    return "; " + ", ".join([document, *through, *packed])
