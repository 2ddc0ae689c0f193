"""The stream: the plan as a function of the row number.

    row n → segment → (source, draw) → epoch, chunk, slot → first token of row n in its source

It does not depend on world size, workers or batch size. A restart calls it with another n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt

from ..arrays import Int64
from .apportionment import Assignment
from .fair.eras import Eras, LoadSlowTable
from .fair.owed import Line, OwedRows
from .fair.slow_jobs import SlowTable
from .kept_tables import load_tables
from .length_steps import Assigned, Debts, LengthSteps
from .plan import Plan
from .refills import Refills
from .simulation import Segment, estimate_simulated_rows, simulate
from .source_order import Draws, Position, SourceOrder
from .steered import SteeredOrder
from .tables import Tables

MIN_CACHED_ROWS = 1 << 17
"""Minimum simulated rows for tables on disk: a quarter of a second."""
BATCH_ROWS = 2048
"""Rows located by one call, which costs little more than for one row."""


@dataclass(frozen=True, eq=False)
class RowLocations:
    """Locations of rows with one length.

    Row i reads the tokens [tokens[i], tokens[i] + length], unless it has several spans.
    """

    rows: Int64
    length: int
    sources: npt.NDArray[np.int32]
    """Indices into the plan's sources."""
    epochs: Int64
    tokens: Int64
    pieces: Mapping[int, Int64] = field(default_factory=dict)
    """Token spans [start, end) by row index, for rows with several."""
    batch: RowLocations | None = None
    """All rows located by the same call; None if these are all."""
    first: int = 0
    """Index of the first row in the batch."""

    @classmethod
    def empty(cls, length: int) -> RowLocations:
        none = np.empty(0, np.int64)
        return cls(none, length, none.astype(np.int32), none, none)

    def __getitem__(self, rows: slice) -> RowLocations:
        first, end, _ = rows.indices(len(self.rows))
        return RowLocations(
            self.rows[rows],
            self.length,
            self.sources[rows],
            self.epochs[rows],
            self.tokens[rows],
            {row - first: spans for row, spans in self.pieces.items() if first <= row < end},
            self.batch or self,
            self.first + first,
        )

    def reads(self) -> TokenReads:
        """List the token spans that the rows read: the inputs, and the last target after them."""
        rows, starts = np.arange(len(self.rows)), self.tokens
        if not self.pieces:
            return TokenReads(rows, np.zeros_like(rows), starts, starts + (self.length + 1))
        split_rows = sorted(self.pieces)
        counts = np.ones_like(rows)
        counts[split_rows] = [len(self.pieces[row]) for row in split_rows]
        spans = np.repeat(np.stack([starts, starts + self.length], axis=1), counts, axis=0)
        spans[np.isin(np.repeat(rows, counts), split_rows)] = np.concatenate(
            [self.pieces[row] for row in split_rows]
        )
        sizes, first_spans = spans[:, 1] - spans[:, 0], np.cumsum(counts) - counts
        tokens_before = np.cumsum(sizes) - sizes
        offsets = tokens_before - np.repeat(tokens_before[first_spans], counts)
        ends = spans[:, 1].copy()
        ends[first_spans + counts - 1] += 1
        return TokenReads(np.repeat(rows, counts), offsets, spans[:, 0], ends)

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Return the input spans [start, end) of the row at an index, in order."""
        if row in self.pieces:
            return [(start, end) for start, end in self.pieces[row].tolist()]
        start = int(self.tokens[row])
        return [(start, start + self.length)]


@dataclass(frozen=True, eq=False)
class TokenReads:
    """Token spans that rows read, row by row."""

    rows: Int64
    """Row index by span."""
    offsets: Int64
    """Inputs of the row before the span."""
    starts: Int64
    ends: Int64
    """A row's last span also includes the last target."""


@dataclass(frozen=True, eq=False)
class LengthSpan:
    """Consecutive phases with one sequence length."""

    first_row: int
    end_row: int
    length: int
    starts: tuple[Position, ...]
    """Positions at the first row, by source."""
    counts: Int64
    """Rows of the plan before the span, by source."""
    orders: tuple[SourceOrder, ...]

    @cached_property
    def draws(self) -> Draws:
        return Draws(self.orders, self.starts, self.length)


@dataclass(frozen=True)
class Shortage:
    """A source with too few tokens for the plan."""

    source: str
    phase: str
    row: int
    """First row that it cannot fill."""
    why: str


class Stream:
    """A plan's rows, located in the sources."""

    def __init__(self, plan: Plan, *, is_prefix: bool = False) -> None:
        """`is_prefix`: a fair plan begins with this one; rows with another length follow."""
        self.plan = plan
        planned = _assign_rows(plan, is_prefix=is_prefix)
        self.assignment: Assignment | Eras | LengthSteps | SteeredOrder = planned
        if plan.decisions:
            assert not isinstance(planned, LengthSteps), "steps by length take no decisions"
            self.assignment = SteeredOrder(plan, planned, _load_slow_tables)
        self.refills = {
            index: Refills(source.refills)
            for index, source in enumerate(plan.sources)
            if source.refills
        }
        self.spans = self._spans()

    def steer(self, plan: Plan) -> Stream:
        """Return the stream of the same plan with further decisions."""
        if plan.decisions == self.plan.decisions:
            return self
        assert plan.decisions[: len(self.plan.decisions)] == self.plan.decisions
        stream, steered = copy(self), self.assignment
        assert not isinstance(steered, LengthSteps), "steps by length take no decisions"
        planned = steered.planned if isinstance(steered, SteeredOrder) else steered
        order = SteeredOrder(plan, planned, _load_slow_tables)
        if isinstance(steered, SteeredOrder):
            order.reuse(steered)
        stream.plan, stream.assignment = plan, order
        stream.spans = stream._spans()
        return stream

    def locate(self, rows: Int64) -> RowLocations:
        """Locate rows with one length."""
        span = self.find_span(int(rows[0]))
        assert rows.min() >= span.first_row and rows.max() < span.end_row, "rows of two lengths"
        sources, draws = self.assignment.locate(rows - self.plan.first_row)
        for source, refills in self.refills.items():
            drawn = sources == source
            draws[drawn] = refills.substitute(draws[drawn])
        located = span.draws.locate(sources, draws - span.counts[sources])
        return RowLocations(rows, span.length, sources, *located)

    def locate_blocks(self, blocks: Iterable[Int64]) -> Iterator[RowLocations]:
        """Locate blocks of rows, each with one length, about BATCH_ROWS rows at a time."""
        for batch in self._batches(blocks):
            located, first = self.locate(np.concatenate(batch)), 0
            for block in batch:
                yield located[first : first + len(block)]
                first += len(block)

    def _batches(self, blocks: Iterable[Int64]) -> Iterator[list[Int64]]:
        """Group blocks with one length into batches. The first batches are short, so that training
        starts early."""
        batch: list[Int64] = []
        rows = end_row = 0
        max_rows = BATCH_ROWS // 32
        for block in blocks:
            if batch and (rows + len(block) > max_rows or block[0] >= end_row):
                yield batch
                batch, rows, max_rows = [], 0, min(2 * max_rows, BATCH_ROWS)
            if not batch:
                end_row = self.find_span(int(block[0])).end_row
            batch.append(block)
            rows += len(block)
        if batch:
            yield batch

    def find_rows(self, source: int, starts: Int64, ends: Int64) -> tuple[Int64, Int64]:
        """Find the rows with an input among a source's tokens [starts[i], ends[i]), for all i.

        Returns pairs, sorted: i, and the row.
        """
        order = self.plan.sources[source].order
        pairs = [np.empty((2, 0), np.int64)]
        for span in self.spans:
            position, first_draw = span.starts[source], int(span.counts[source])
            drawn = int(self.counts(span.end_row)[source]) - first_draw
            if not drawn:
                continue
            refills = self.refills.get(source)
            served = drawn if refills is None else refills.end_draw
            last_epoch = order.advance(position, span.length, served - 1).epoch
            epoch_start = -position.row  # the draw with the epoch's row 0
            for epoch in range(position.epoch, last_epoch + 1):
                if epoch > position.epoch:
                    position = Position(epoch=epoch)
                owners, rows = order.find_rows(position, span.length, starts, ends)
                draws = epoch_start + rows
                is_drawn = np.flatnonzero((draws >= 0) & (draws < served))
                draws = first_draw + draws[is_drawn]
                if refills is not None:
                    draws, is_served = refills.find_draws(draws, drawn)
                    is_drawn = is_drawn[is_served]
                rows = self.assignment.locate_draws(source, draws)
                pairs.append(np.stack([owners[is_drawn], self.plan.first_row + rows]))
                epoch_start += order.end_row(epoch, span.length, position.cuts)
        owners, rows = np.concatenate(pairs, axis=1)
        sorted_pairs = np.lexsort([rows, owners])
        return owners[sorted_pairs], rows[sorted_pairs]

    def counts(self, row: int) -> Int64:
        """Count the plan's rows before `row`, by source."""
        return self.assignment.counts(row - self.plan.first_row)

    def tokens(self, row: int) -> list[int]:
        """Count the plan's tokens before `row`, by source."""
        totals = np.zeros(len(self.plan.sources), np.int64)
        for span in self.spans:
            if span.first_row < row:
                drawn = self.counts(min(row, span.end_row)) - span.counts
                totals += drawn * span.length
        return [int(total) for total in totals]

    def approximate_counts(self, row: int) -> Int64:
        """Approximate `counts(row)` to within a row: fast, for pictures."""
        return self.assignment.approximate_counts(row - self.plan.first_row)

    def positions(self, row: int) -> tuple[Position, ...]:
        """Return the position before `row` by source, in rows with the length before it."""
        span = self.find_span(max(row - 1, self.plan.first_row))
        drawn = self.counts(row) - span.counts
        return tuple(
            source.order.advance(start, span.length, int(count))
            for source, start, count in zip(self.plan.sources, span.starts, drawn, strict=True)
        )

    def debts(self, row: int) -> list[Fraction]:
        """Compute the tokens owed to each source before `row`."""
        return self.assignment.debts(row - self.plan.first_row)

    def shortages(self) -> Iterator[Shortage]:
        """Yield the sources with more drawn epochs than `max_epochs`."""
        for index, source in enumerate(self.plan.sources):
            row = self._find_exhausted_row(index)
            if row is None:
                continue
            phase = self.plan.phase_at(row)
            length = phase.seq_len
            epoch_tokens = source.order.end_row(source.max_epochs, length) * length
            if not epoch_tokens:
                why = (
                    f"a sequence of {length:,} tokens is longer than the source "
                    f"({source.order.tokens:,} tokens)"
                )
            else:
                needed = int(self.counts(phase.end_row)[index] - self.counts(row)[index])
                why = (
                    f"runs dry at row {row:,}: its {source.max_epochs} "
                    f"epoch{'s' * (source.max_epochs > 1)} of {epoch_tokens:,} tokens are used "
                    f"up, and the phase wants {needed * length:,} tokens more"
                )
            yield Shortage(source.name, phase.name, row, why)

    def _find_exhausted_row(self, index: int) -> int | None:
        """Find the first row that needs an epoch beyond `max_epochs`."""
        source = self.plan.sources[index]
        for span in self.spans:
            start = span.starts[index]
            drawn = int(self.counts(span.end_row)[index] - span.counts[index])
            supply = source.order.rows_left(start, span.length, source.max_epochs)
            if drawn <= supply:
                continue
            max_count = span.counts[index] + supply
            low, high = span.first_row, span.end_row
            while high - low > 1:  # counts(low) <= max_count < counts(high)
                middle = (low + high) // 2
                if self.counts(middle)[index] <= max_count:
                    low = middle
                else:
                    high = middle
            return low
        return None

    def find_span(self, row: int) -> LengthSpan:
        return next(span for span in reversed(self.spans) if span.first_row <= row)

    def _spans(self) -> list[LengthSpan]:
        orders = tuple(source.order for source in self.plan.sources)
        starts = tuple(source.start for source in self.plan.sources)
        counts = np.zeros(len(orders), np.int64)
        spans: list[LengthSpan] = []
        for length, grouped in groupby(self.plan.phases, lambda phase: phase.seq_len):
            phases = list(grouped)
            first_row, end_row = phases[0].first_row, phases[-1].end_row
            if spans:
                before = spans[-1]
                counts = self.counts(first_row)
                drawn = (counts - before.counts).tolist()
                starts = tuple(
                    order.change_length(
                        order.advance(start, before.length, count), before.length, length
                    )
                    for order, start, count in zip(orders, before.starts, drawn, strict=True)
                )
            spans.append(LengthSpan(first_row, end_row, length, starts, counts, orders))
        return spans


def _assign_rows(plan: Plan, *, is_prefix: bool) -> Assignment | Eras | LengthSteps:
    fair = plan.fair or is_prefix
    name = f"{plan.hash}-beginning" if is_prefix else plan.hash
    debts = plan.debts or (Fraction(0),) * len(plan.sources)

    def assign_group(part: str, segments: list[Segment], debts: Debts) -> Assigned:
        if not fair:
            return _assign_by_tables(f"{name}-{part}", segments)
        eras = [
            (tokens, [Line(era.rows, era.weights, era.weights) for era in grouped])
            for tokens, grouped in groupby(segments, lambda segment: segment.row_tokens)
        ]
        pays_debts = is_prefix or plan.parent is not None or len(eras) > 1
        return _assign_fairly(f"{name}-{part}", eras, debts, pays_debts=pays_debts)

    if plan.lengths:
        return LengthSteps(plan, assign_group)
    if not fair:
        return _assign_by_tables(name, plan.segments())
    lines = plan.lines()
    pays_debts = is_prefix or plan.parent is not None or len(lines) > 1
    return _assign_fairly(name, lines, debts, pays_debts=pays_debts)


def _assign_by_tables(name: str, segments: list[Segment]) -> Assignment:
    tables = None
    if estimate_simulated_rows(segments) > MIN_CACHED_ROWS:
        tables = load_tables(name, lambda: simulate(segments)[0], Tables)
    return Assignment(segments, tables)


def _assign_fairly(
    name: str, lines: list[tuple[int, list[Line]]], debts: Debts, *, pays_debts: bool
) -> Eras:
    return Eras(lines, debts, pays_debts=pays_debts, load=_load_slow_tables(name))


def _load_slow_tables(name: str) -> LoadSlowTable:
    """Return a function that keeps the slow jobs of large eras on this host; `name` identifies the
    order."""

    def load(number: int, owed: OwedRows, compute: Callable[[], SlowTable]) -> SlowTable:
        if owed.rows <= MIN_CACHED_ROWS:
            return compute()
        return load_tables(f"{name}-era-{number}", compute, SlowTable)

    return load
