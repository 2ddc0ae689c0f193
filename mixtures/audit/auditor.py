"""Show the documents in a plan's rows.

- A row has a source, an epoch, documents, and a hash over the tokens.
- A step has rows. For a run they are proved: the hash must equal the ledger's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property

import numpy as np

from ...console.errors import IntegrityError, PlanError
from ...dataplane import tokenizers
from ...dataplane.arrays import Int64
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.loader.rows import RowReader
from ...dataplane.loader.unlearnt import find_unlearnt
from ...dataplane.order.plan import Phase
from ...dataplane.order.timeline import PlanStep
from ...dataplane.runlog import ledger
from ...dataplane.storage import storage
from ...dataplane.tokenizers import Tokenizer, brackets
from ..planning.open_plan import OpenedPlan
from .audit_rows import AuditedRow, DocumentInRow, ThroughView

BLOCK_ROWS = 256
"""Rows read together."""


class Auditor:
    """Reads a plan's rows and documents."""

    def __init__(self, opened: OpenedPlan, *, text: bool = False) -> None:
        self.opened = opened
        self.plan = opened.plan
        self.text = text
        self.reader = RowReader(opened.plan, stream=opened.stream)
        self._tokenizer = cache(self._load_tokenizer)

    def check_rows(self, rows: range) -> range:
        """Raise PlanError unless the plan has these rows."""
        if rows.start < self.plan.first_row or rows.stop > self.plan.end_row:
            raise PlanError(
                f"the plan has rows {self.plan.first_row:,} to {self.plan.end_row:,}, not "
                f"{rows.start:,}:{rows.stop:,}",
                hint=self._hint_about_earlier(),
            )
        return rows

    def rows(self, rows: range) -> Iterator[AuditedRow]:
        """Yield rows with documents and hashes."""
        self.check_rows(rows)
        for phase in self.plan.phases:
            first_row, end_row = max(rows.start, phase.first_row), min(rows.stop, phase.end_row)
            for start in range(first_row, end_row, BLOCK_ROWS):
                yield from self._block(np.arange(start, min(start + BLOCK_ROWS, end_row)), phase)

    def step(self, number: int) -> tuple[list[AuditedRow], bool]:
        """Read a step's rows; also returns True if the run's ledger proves them.

        A ledger that begins after the plan's first step cannot prove its own first step: the hash
        before it is lost.
        """
        planned = self._planned_step(number)
        before, entry = (
            ledger.find_entries(self.opened.ledger, number) if self.opened.ledger else (None, None)
        )
        audited = list(self.rows(range(planned.first_row, planned.end_row)))
        if entry is None or (before is None and number > self.plan.first_step):
            return audited, False
        if (entry.first_row, entry.rows) != (planned.first_row, planned.rows):
            raise IntegrityError(
                f"step {number} took rows {entry.first_row:,} to {entry.end_row:,} by the ledger, "
                f"but rows {planned.first_row:,} to {planned.end_row:,} by the plan",
                where=self.opened.ledger,
                hint="restore the plan.json that the run was started with",
            )
        previous = self.hash_before(number)
        digests = bytes.fromhex("".join(row.tokens_hash for row in audited))
        decided = self.plan.decision_digest(planned.first_row)
        if ledger.roll(previous, decided + digests) != entry.hash:
            raise IntegrityError(
                f"the rows of step {number} do not match their hash in the ledger: the datasets, "
                "the plan or the ledger were changed after the run",
                where=self.opened.ledger,
                hint="check the datasets of the plan with `tokenize verify URL`",
            )
        return audited, True

    def find_rows(self, step: int) -> range:
        """Return the rows of a step."""
        planned = self._planned_step(step)
        return range(planned.first_row, planned.end_row)

    def has_taken(self, number: int) -> bool:
        """Tell, from the ledger, whether the run has taken this step."""
        return self._planned_step(number).first_row < (self._rows_taken or 0)

    def documents(self, row: int) -> list[DocumentInRow]:
        """List a row's documents from tables alone: no token is read."""
        located = self.reader.stream.locate(np.array([row], np.int64))
        dataset = self.reader.dataset(int(located.sources[0]))
        return list(self._documents(dataset, located.spans(0)))

    def texts(self, row: int) -> list[str]:
        """Decode a row's documents, piece by piece."""
        located = self.reader.stream.locate(np.array([row], np.int64))
        source = int(located.sources[0])
        [tokens] = self.reader.read(self.reader.find(located)).arrays.tokens
        pieces = self._documents(self.reader.dataset(source), located.spans(0))
        return [
            self._decode(source, tokens[piece.at : piece.at + piece.tokens].tolist())
            for piece in pieces
        ]

    def _block(self, rows: Int64, phase: Phase) -> Iterator[AuditedRow]:
        located = self.reader.stream.locate(rows)
        block = self.reader.read(self.reader.find(located))
        for index, row in enumerate(rows.tolist()):
            source = int(located.sources[index])
            dataset, spans = self.reader.dataset(source), list(located.spans(index))
            ids = block.arrays.tokens[index, :-1].tolist()
            yield AuditedRow(
                row=row,
                step=phase.first_step + (row - phase.first_row) // phase.batch_rows,
                phase=phase.name,
                source=self.plan.sources[source].name,
                epoch=int(located.epochs[index]),
                documents=tuple(self._documents(dataset, spans)),
                tokens_hash=block.digests[index].hex(),
                text=self._decode(source, ids) if self.text else None,
                bracketed=self._bracketed(source, ids, spans) if self.text else None,
            )

    def _documents(
        self, dataset: Dataset, spans: Iterable[tuple[int, int]]
    ) -> Iterator[DocumentInRow]:
        """Yield a row's documents in order; a document in two spans comes twice."""
        offset = 0
        for start, end in spans:
            yield from self._documents_in_span(dataset, start, end, offset)
            offset += end - start

    def _documents_in_span(
        self, dataset: Dataset, start: int, end: int, offset: int
    ) -> Iterator[DocumentInRow]:
        spans = dataset.documents(start, end)
        first = spans[0].number
        origins = dataset.origins(first, spans[-1].number + 1)
        fields = dataset.fields(first, spans[-1].number + 1)
        views = trace_views(dataset, first, spans[-1].number + 1)
        for span in spans:
            origin = origins[span.number - first]
            first_token = max(start, span.first_token)
            end_token = min(end, span.first_token + span.tokens)
            yield DocumentInRow(
                document=span.number,
                id=origin.id,
                file=origin.file,
                position=origin.position,
                tokens=end_token - first_token,
                first=first_token - span.first_token,
                at=offset + first_token - start,
                fields=fields[span.number - first] if fields else None,
                view=views[span.number - first] if views else None,
            )

    def _planned_step(self, number: int) -> PlanStep[Phase]:
        plan = self.plan
        if not plan.first_step <= number < plan.end_step:
            raise PlanError(
                f"the plan has steps {plan.first_step:,} to {plan.end_step - 1:,}, not {number:,}",
                hint=self._hint_about_earlier(),
            )
        return plan.step(number)

    def _hint_about_earlier(self) -> str | None:
        parent = self.plan.parent
        return (
            f"audit the run that it continues, {parent.run}, for earlier ones" if parent else None
        )

    def hash_before(self, step: int) -> str:
        """Find the ledger's hash before a step."""
        if self.opened.ledger is not None:
            before, _ = ledger.find_entries(self.opened.ledger, step)
            if before is not None:
                return before.hash
        if self.plan.parent is None:
            return self.plan.hash
        parent = storage.join(self.plan.parent.run, ledger.NAME)
        _, entry = ledger.find_entries(parent, step - 1)
        if entry is None:
            raise PlanError(
                f"the ledger of the run that this run continues has no step {step - 1}, so the "
                "first step cannot be proved",
                where=parent,
                hint="restore the ledger of that run",
            )
        return entry.hash

    @cached_property
    def _rows_taken(self) -> int | None:
        """End of the rows that the run has taken; None without a ledger."""
        if self.opened.ledger is None:
            return None
        newest = ledger.read_last(self.opened.ledger)
        return newest.end_row if newest else self.plan.first_row

    def _decode(self, source: int, ids: list[int]) -> str:
        return self._tokenizer(source).decode(ids)

    def _bracketed(
        self, source: int, ids: list[int], spans: Sequence[tuple[int, int]]
    ) -> str | None:
        """Decode ids, with brackets around unlearnt tokens; None if all have the same weight."""
        dataset, unlearnt = self.reader.dataset(source), self.reader.unlearnt.get(source)
        if dataset.weight_table is None and unlearnt is None:
            return None
        weights = np.ones(len(ids))
        if dataset.weight_table is not None:
            codes = np.concatenate([codes for span in spans for codes in dataset.codes(*span)])
            weights = dataset.weight_table[codes[: len(ids)]].astype(float).round(6)
        if unlearnt is not None:
            tokens = np.concatenate([np.arange(*span) for span in spans])
            weights[find_unlearnt(unlearnt, tokens[: len(ids)])] = 0.0
        return brackets.format_brackets(self._tokenizer(source), ids, weights.tolist())

    def _load_tokenizer(self, source: int) -> Tokenizer:
        return tokenizers.load(
            self.reader.dataset(source).manifest.tokenizer, self.plan.sources[source].url
        )


def trace_views(dataset: Dataset, first: int, end: int) -> list[ThroughView]:
    """Trace a view's documents to the dataset with the tokens; empty for this dataset itself."""
    view = dataset.view
    if view is None:
        return []
    return [
        ThroughView(
            dataset=view.url,
            document=number,
            where=view.where,
            packed=view.bins,
            first=None if view.bins is None else token,
        )
        for number, token in dataset.base_positions(first, end)
    ]
