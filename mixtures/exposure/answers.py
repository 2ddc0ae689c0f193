"""Answers as text and JSON: a run, its documents with their exposures, and sources that are gone.

Fields are keys of the JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ...console.progress import exact_count
from ...dataplane.shards.documents import DocumentOrigin, format_place
from ..audit.audit_rows import ThroughView, describe_view, format_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """A piece of a document in a row that a run has served, or will serve."""

    served_by: str
    """The run, or a run that it continues."""
    row: int
    step: int
    phase: str
    epoch: int
    first: int
    """First token, counted in the document."""
    tokens: int
    at: int
    """First token, counted in the row."""
    loss_weight: float
    """Sum over the document's targets in the row."""
    seen: bool | None
    """True if the run has taken this row; None without a ledger."""
    undone: bool
    """True if the weights do not hold the step: it was skipped or rolled back."""
    first_checkpoint: int | None
    """The run's first checkpoint that had seen it."""

    def json_data(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def format_text(self, run: str) -> str:
        served_by = "" if self.served_by == run else f" of {self.served_by}"
        status = {True: "", False: "; not served yet", None: "; planned"}[self.seen]
        if self.undone:
            status = "; skipped or rolled back"
        if self.first_checkpoint is not None:
            until = " until then" if self.undone else " on"
            status += f"; in the checkpoints from step {self.first_checkpoint:,}{until}"
        return (
            f"    row {self.row:,}{served_by} (step {self.step:,}, phase {self.phase}, epoch "
            f"{self.epoch}): its tokens {self.first:,} to {self.first + self.tokens:,}, at "
            f"{self.at:,} of the row, loss weight {self.loss_weight:,g}{status}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentAnswer:
    """A document that was asked for, and its exposures in a run."""

    run: str
    source: str
    document: int
    """Document number in the dataset."""
    key: str
    """What was asked for."""
    origin: DocumentOrigin
    tokens: int
    view: ThroughView | None
    exposures: tuple[Exposure, ...]

    def json_data(self) -> dict[str, Any]:
        data = {
            "run": self.run,
            "asked": self.key,
            "source": self.source,
            "document": self.document,
            **vars(self.origin),
            "tokens": self.tokens,
            "exposures": [exposure.json_data() for exposure in self.exposures],
        }
        return data | ({} if self.view is None else {"view": self.view.json_data()})

    def format_json(self) -> str:
        return json.dumps(self.json_data())

    def format_text(self) -> str:
        lines = [
            f"  document {self.document:,}{format_id(self.origin.id)} of {self.source}: "
            f"{self.tokens:,} tokens, {format_place(self.origin.file, self.origin.position)}"
            f"{describe_view(self.view)}"
        ]
        lines += [exposure.format_text(self.run) for exposure in self.exposures]
        return "\n".join(lines if self.exposures else [*lines, "    in no row"])


@dataclass(frozen=True, kw_only=True)
class SourceAnswer:
    """A source whose documents cannot be looked up, and how much of it a run has served."""

    run: str
    source: str
    problem: str
    tokens: int
    """Tokens in the source."""
    served_tokens: int
    """Tokens in the rows that the run has served; without a ledger, in all of the plan's rows."""
    epochs: int
    """Epochs that these rows have begun."""

    def format_json(self) -> str:
        return json.dumps(vars(self))

    def format_text(self) -> str:
        return (
            f"  source {self.source} cannot be searched: {self.problem}; by the plan and the "
            f"ledger, rows with {self.served_tokens:,} of its {self.tokens:,} tokens were served, "
            f"in {self.epochs} epoch{'s' * (self.epochs != 1)}"
        )


@dataclass
class RunSummary:
    """Totals over a run's documents."""

    documents: int = 0
    seen_documents: int = 0
    planned_documents: int = 0
    """Documents that only rows not yet served hold."""
    exposures: int = 0
    """Exposures in rows that were served."""
    tokens: int = 0
    loss_weight: float = 0.0

    def add(self, answer: DocumentAnswer) -> None:
        seen = [exposure for exposure in answer.exposures if exposure.seen]
        self.documents += 1
        self.seen_documents += bool(seen)
        self.planned_documents += bool(answer.exposures) and not seen
        self.exposures += len(seen)
        self.tokens += sum(exposure.tokens for exposure in seen)
        self.loss_weight += sum(exposure.loss_weight for exposure in seen if not exposure.undone)

    def format_text(self, run: str) -> str:
        planned = (
            f"; {self.planned_documents:,} more in rows that it has not served"
            if self.planned_documents
            else ""
        )
        return (
            f"{run}: {self.seen_documents:,} of "
            f"{exact_count(self.documents, 'documents')} seen, in "
            f"{self.exposures:,} pieces of {self.tokens:,} tokens with loss weight "
            f"{self.loss_weight:,g}{planned}"
        )
