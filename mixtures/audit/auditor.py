"""What rows hold, and where documents go: the plan, read backwards.

- A row has a source, an epoch, documents, and the hash of its tokens.
- A step has rows; those of a run are proven to hash to what its ledger says.
- A document has tokens, and they have rows that take them as inputs, one or more in each epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, cached_property

import numpy as np

from ...console.errors import IntegrityError, PlanError
from ...dataplane import tokenizers
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.loader.rows import RowReader
from ...dataplane.order.permutation import Int64
from ...dataplane.order.plan import Phase
from ...dataplane.order.timeline import Step
from ...dataplane.runlog import ledger
from ...dataplane.runlog.ledger import Entry
from ...dataplane.storage import storage
from ...dataplane.tokenizers import Tokenizer
from ..planning.open_plan import OpenedPlan
from .audit_rows import AuditedDocument, AuditedRow, DocumentInRow, Occurrence

BLOCK = 256
"""Rows read at once."""


class Auditor:
    """Answers questions about one plan."""

    def __init__(self, target: OpenedPlan, *, text: bool = False) -> None:
        self.target = target
        self.plan = target.plan
        self.text = text
        self.reader = RowReader(target.plan, stream=target.stream)
        self._tokenizer = cache(self._load_tokenizer)

    def rows(self, rows: range) -> Iterator[AuditedRow]:
        """What rows hold."""
        if rows.start < self.plan.first_row or rows.stop > self.plan.last_row:
            before = " (those before it belong to the run that it continues)"
            raise PlanError(
                f"the plan has rows {self.plan.first_row:,} up to {self.plan.last_row:,}"
                f"{before if self.plan.parent else ''}, not {rows.start:,}:{rows.stop:,}"
            )
        for phase in self.plan.phases:
            first, last = max(rows.start, phase.first_row), min(rows.stop, phase.last_row)
            for start in range(first, last, BLOCK):
                yield from self._block(np.arange(start, min(start + BLOCK, last)), phase)

    def step(self, number: int) -> tuple[list[AuditedRow], bool]:
        """The rows of an update, and whether they were proven to be those that a run took."""
        planned = self._planned_step(number)
        before, entry = (
            ledger.find(self.target.ledger, number) if self.target.ledger else (None, None)
        )
        seen = list(self.rows(range(planned.first_row, planned.last_row)))
        if entry is None:
            return seen, False
        if (entry.first_row, entry.rows) != (planned.first_row, planned.rows):
            raise IntegrityError(
                f"the ledger says that step {number} took rows {entry.first_row:,} up to "
                f"{entry.last_row:,}; the plan says {planned.first_row:,} up to "
                f"{planned.last_row:,}",
                where=self.target.ledger,
            )
        previous = self._hash_before(number, before)
        if ledger.roll(previous, (bytes.fromhex(row.tokens_hash) for row in seen)) != entry.hash:
            raise IntegrityError(
                f"the rows of step {number} do not hash to what the ledger says: the datasets, the "
                "plan or the ledger were changed since",
                where=self.target.ledger,
            )
        return seen, True

    def find(self, document: str, source: str | None) -> Iterator[AuditedDocument]:
        """A document by its number in a dataset, or by the user's own id (`id:7` if that is a
        number, too), in one source or in all."""
        names = [planned.name for planned in self.plan.sources]
        if source is not None and source not in names:
            raise PlanError(f"the plan has no source {source}", hint=f"it has {', '.join(names)}")
        found = False
        drawn = self.reader.stream.counts(self.plan.last_row)
        for index, name in enumerate(names):
            # Without a name, only where the plan draws from: the others need not even exist.
            if name != source if source is not None else not drawn[index]:
                continue
            for number in self._numbers(self.reader.dataset(index), document):
                found = True
                yield self._whereabouts(index, number)
        if not found:
            where = source or "any source that the plan draws from"
            raise PlanError(
                f"there is no document {document} in {where}",
                hint="name it by its number in the dataset (from 0), or by its own id",
            )

    def _block(self, rows: Int64, phase: Phase) -> Iterator[AuditedRow]:
        located = self.reader.stream.locate(rows)
        block = self.reader.read(located)
        for place, row in enumerate(rows.tolist()):
            source, start = int(located.sources[place]), int(located.tokens[place])
            tokens = block.arrays.tokens[place]
            yield AuditedRow(
                row=row,
                step=phase.first_step + (row - phase.first_row) // phase.batch_rows,
                phase=phase.name,
                source=self.plan.sources[source].name,
                epoch=int(located.epochs[place]),
                documents=tuple(
                    self._documents(self.reader.dataset(source), start, start + located.length)
                ),
                tokens_hash=block.digests[place].hex(),
                text=self._decode(source, tokens[:-1].tolist()) if self.text else None,
            )

    def _documents(self, dataset: Dataset, start: int, end: int) -> Iterator[DocumentInRow]:
        spans = dataset.documents(start, end)
        first = spans[0].number
        origins = dataset.origins(first, spans[-1].number + 1)
        for span in spans:
            origin = origins[span.number - first]
            last = span.first_token + span.tokens
            yield DocumentInRow(
                document=span.number,
                id=origin.id,
                file=origin.file,
                position=origin.position,
                tokens=min(end, last) - max(start, span.first_token),
            )

    def _planned_step(self, number: int) -> Step[Phase]:
        plan = self.plan
        if not plan.first_step <= number < plan.last_step:
            before = " (those before it belong to the run that it continues)"
            raise PlanError(
                f"the plan has steps {plan.first_step:,} up to {plan.last_step:,}"
                f"{before if plan.parent else ''}, not {number:,}"
            )
        return plan.step(number)

    def _hash_before(self, step: int, before: Entry | None) -> str:
        """The ledger's hash when a step began."""
        if before is not None:
            return before.hash
        if self.plan.parent is None:
            return self.plan.hash
        parent = storage.join(self.plan.parent.run, ledger.NAME)
        _, entry = ledger.find(parent, step - 1)
        if entry is None:
            raise PlanError(
                f"the first step of a run goes on from the ledger of the run before it, and that "
                f"has no step {step - 1}",
                where=parent,
            )
        return entry.hash

    def _numbers(self, dataset: Dataset, document: str) -> Iterable[int]:
        """The documents of a dataset that are called so."""
        count = int(dataset.shard_documents[-1])
        if document.isdecimal():
            return [int(document)] if int(document) < count else []
        wanted = document.removeprefix("id:")
        return (
            first + place
            for first, last in zip(
                dataset.shard_documents[:-1].tolist(),
                dataset.shard_documents[1:].tolist(),
                strict=True,
            )
            for place, origin in enumerate(dataset.origins(first, last))
            if origin.id == wanted
        )

    def _whereabouts(self, source: int, number: int) -> AuditedDocument:
        dataset, name = self.reader.dataset(source), self.plan.sources[source].name
        start, end = dataset.document(number)
        rows = self.reader.stream.rows_with(source, start, end)
        text = None
        if self.text:
            tokens = np.empty(end - start, np.int64)
            dataset.fill(start, tokens)
            text = self._decode(source, tokens.tolist())
        return AuditedDocument(
            source=name,
            document=number,
            origin=dataset.origins(number, number + 1)[0],
            tokens=end - start,
            sightings=tuple(self._sighting(row, start, end) for row in rows.tolist()),
            text=text,
        )

    def _sighting(self, row: int, start: int, end: int) -> Occurrence:
        located = self.reader.stream.locate(np.array([row], np.int64))
        step, token = self.plan.step_at(row), int(located.tokens[0])
        first = max(token, start)
        return Occurrence(
            row=row,
            step=step.number,
            phase=step.phase.name,
            epoch=int(located.epochs[0]),
            first=first - start,
            tokens=min(token + located.length, end) - first,
            seen=None if self._rows_taken is None else row < self._rows_taken,
        )

    @cached_property
    def _rows_taken(self) -> int | None:
        """One past the last row that the run has taken; None where there is no ledger."""
        if self.target.ledger is None:
            return None
        newest = ledger.last(self.target.ledger)
        return newest.last_row if newest else self.plan.first_row

    def _decode(self, source: int, ids: list[int]) -> str:
        return self._tokenizer(source).decode(ids)

    def _load_tokenizer(self, source: int) -> Tokenizer:
        return tokenizers.load(
            self.reader.dataset(source).manifest.tokenizer, self.plan.sources[source].url
        )
