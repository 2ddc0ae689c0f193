"""Answer where documents were trained on, run by run, from plans, ledgers and tables of documents.

Shards are opened for their tables of documents, and for loss weights. Where a dataset is gone, the
plan and the ledger still tell how much of the source was served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...console.errors import PlanError, UserError
from ...dataplane.arrays import Int64
from ...dataplane.datasets.dataset import Dataset, open_pinned
from ...dataplane.order.plan import PlanSource
from ..audit.auditor import trace_views
from .answers import DocumentAnswer, Exposure, SourceAnswer
from .lineage import Lineage, ServedRows
from .pieces import find_pieces
from .request import WITHOUT_IDS, DocumentRequest, Match

BLOCK_DOCUMENTS = 4096
"""Documents searched together."""


@dataclass(eq=False)
class Finder:
    """Searches lineages; a dataset that several runs read is opened and searched once."""

    request: DocumentRequest
    source_name: str | None = None
    """The only source to search; None: all."""
    matched_keys: set[str] = field(default_factory=set)
    """What was asked for, and is in a dataset."""
    is_partial: bool = False
    """True if a source could not be searched."""
    _opened: dict[tuple[str, str], tuple[Dataset, list[Match]] | str] = field(default_factory=dict)

    def find(self, lineage: Lineage) -> Iterator[DocumentAnswer | SourceAnswer]:
        """Yield the answers for a run: its documents, and sources that cannot be searched."""
        sources = lineage.served[-1].plan.sources
        names = [source.name for source in sources]
        if self.source_name is not None and self.source_name not in names:
            raise PlanError(
                f"the plan of {lineage.name} has no source {self.source_name}",
                hint=f"it has {', '.join(names)}",
            )
        for source in sources:
            if self.source_name not in (None, source.name):
                continue
            if not any(
                _count_rows(served, source.name, served.end_row) for served in lineage.served
            ):
                continue  # its dataset need not exist
            opened = self._open(source)
            if isinstance(opened, str):
                self.is_partial = True
                yield _source_answer(lineage, source, opened)
                continue
            dataset, matches = opened
            if self.request.ids and not dataset.has_ids:
                self.is_partial = True
                yield _source_answer(lineage, source, WITHOUT_IDS)
            for match in matches:
                self.matched_keys.update((match.key, *match.further_keys))
            for start in range(0, len(matches), BLOCK_DOCUMENTS):
                block = matches[start : start + BLOCK_DOCUMENTS]
                yield from answer_documents(lineage, source.name, dataset, block)

    def _open(self, source: PlanSource) -> tuple[Dataset, list[Match]] | str:
        """Open a dataset and match its documents; returns why not if the dataset is gone."""
        key = (source.url, source.dataset)
        if key not in self._opened:
            try:
                dataset = open_pinned(
                    source.url,
                    hash=source.dataset,
                    generations=source.generations,
                    name=source.name,
                )
                self._opened[key] = dataset, self.request.match(dataset)
            except UserError as error:
                self._opened[key] = error.message
        return self._opened[key]


def answer_documents(
    lineage: Lineage, source: str, dataset: Dataset, matches: Sequence[Match]
) -> Iterator[DocumentAnswer]:
    """Answer where documents of a dataset stood, in all rows of a lineage."""
    numbers = np.array([match.number for match in matches], np.int64)
    exposures: list[list[Exposure]] = [[] for _ in matches]
    for served in lineage.served:
        for document, exposure in _find_exposures(lineage, served, source, dataset, numbers):
            exposures[document].append(exposure)
    starts, ends = dataset.document_spans(numbers)
    for match, document_exposures, tokens in zip(
        matches, exposures, (ends - starts).tolist(), strict=True
    ):
        views = trace_views(dataset, match.number, match.number + 1)
        yield DocumentAnswer(
            run=lineage.name,
            source=source,
            document=match.number,
            key=match.key,
            origin=match.origin,
            tokens=tokens,
            view=views[0] if views else None,
            exposures=tuple(document_exposures),
        )


def _find_exposures(
    lineage: Lineage, served: ServedRows, source: str, dataset: Dataset, numbers: Int64
) -> Iterator[tuple[int, Exposure]]:
    """Yield the exposures in one run's rows, each with the document's index in `numbers`."""
    index = _source_index(served, source)
    if index is None:
        return
    pieces = find_pieces(served.stream, index, dataset, numbers, served.end_row)
    phase_ids, steps = _locate_steps(served, pieces.rows)
    undone_ends = _undone_ends(served, steps)
    checkpoints = np.array([*lineage.checkpoints, np.iinfo(np.int64).max], np.int64)
    firsts = checkpoints[np.searchsorted(checkpoints, steps, side="right")]
    # A rollback forgets a step; checkpoints between the two had seen it.
    holds = (firsts < checkpoints[-1]) & ((undone_ends == 0) | (firsts < undone_ends))
    taken = served.taken_rows
    phases = served.plan.phases
    for (
        document,
        row,
        epoch,
        first,
        tokens,
        at,
        weight,
        phase,
        step,
        undone,
        checkpoint,
        held,
    ) in zip(
        *(values.tolist() for values in vars(pieces).values()),
        *(values.tolist() for values in (phase_ids, steps, undone_ends, firsts, holds)),
        strict=True,
    ):
        seen = None if taken is None else row < taken
        yield (
            document,
            Exposure(
                served_by=served.run,
                row=row,
                step=step,
                phase=phases[phase].name,
                epoch=epoch,
                first=first,
                tokens=tokens,
                at=at,
                loss_weight=weight,
                seen=seen,
                undone=undone > 0,
                first_checkpoint=checkpoint if held and seen else None,
            ),
        )


def _locate_steps(served: ServedRows, rows: Int64) -> tuple[Int64, Int64]:
    """Return the phase's index and the step of each row."""
    phases = served.plan.phases
    first_rows, first_steps, batch_rows = np.array(
        [(phase.first_row, phase.first_step, phase.batch_rows) for phase in phases], np.int64
    ).T
    ids = np.searchsorted(first_rows, rows, side="right") - 1
    return ids, first_steps[ids] + (rows - first_rows[ids]) // batch_rows[ids]


def _undone_ends(served: ServedRows, steps: Int64) -> Int64:
    """Return, for each step, one past the step that undid it; 0 if the weights hold it."""
    ends = np.zeros(len(steps), np.int64)
    for first, end in served.undone_steps[::-1].tolist():  # the earliest wins
        ends[(steps >= first) & (steps < end)] = end
    return ends


def _source_answer(lineage: Lineage, source: PlanSource, problem: str) -> SourceAnswer:
    tokens = 0
    epochs = 0
    for served in lineage.served:
        end_row = served.end_row if served.taken_rows is None else served.taken_rows
        tokens += _count_tokens(served, source.name, end_row)
        epochs = max(epochs, _count_epochs(served, source.name, end_row))
    return SourceAnswer(
        run=lineage.name,
        source=source.name,
        problem=problem,
        tokens=source.order.tokens,
        served_tokens=tokens,
        epochs=epochs,
    )


def _source_index(served: ServedRows, name: str) -> int | None:
    names = [source.name for source in served.plan.sources]
    return names.index(name) if name in names else None


def _count_rows(served: ServedRows, name: str, end_row: int) -> int:
    """Count the rows before `end_row` that hold a source."""
    index = _source_index(served, name)
    return 0 if index is None else int(served.stream.counts(end_row)[index])


def _count_tokens(served: ServedRows, name: str, end_row: int) -> int:
    """Count the source's tokens in the rows before `end_row`."""
    return sum(
        span.length
        * (
            _count_rows(served, name, min(span.end_row, end_row))
            - _count_rows(served, name, span.first_row)
        )
        for span in served.stream.spans
        if span.first_row < end_row
    )


def _count_epochs(served: ServedRows, name: str, end_row: int) -> int:
    """Count the epochs that the rows before `end_row` have begun."""
    index = _source_index(served, name)
    if index is None:
        return 0
    position = served.stream.positions(end_row)[index]
    return position.epoch + (position.row > 0)
