"""The stream: the plan as a function of the row number.

    row n → segment → (source, draw) → epoch, chunk, place → the first token of n in its source

It does not depend on world size, workers or batch size. A restart calls it with another n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..arrays import Int64
from .apportionment import Assignment
from .fair.eras import Eras
from .fair.owed import Owed
from .fair.slow_jobs import SlowTable
from .kept_tables import kept
from .plan import Phase, Plan
from .simulation import most_simulated, simulate
from .source_order import Draws, Position, SourceOrder
from .tables import Tables

KEPT_ROWS = 1 << 17
"""Plans whose simulation may take more rows than this keep their tables on disk; a quarter of a
second of simulation."""
AHEAD = 2048
"""Rows located by one call: the arithmetic costs little more for many rows than for one."""


@dataclass(frozen=True, eq=False)
class Located:
    """Locations of rows of one length: row i reads the tokens [tokens[i], tokens[i] + length],
    unless it has several spans."""

    rows: Int64
    length: int
    sources: npt.NDArray[np.int32]
    """Indices into the plan's sources."""
    epochs: Int64
    tokens: Int64
    pieces: Mapping[int, Int64] = field(default_factory=dict)
    """The spans of tokens [start, end) of the rows that have several, by place."""
    whole: Located | None = None
    """All rows that were located together, of which these are a part; None if these are all."""
    first: int = 0
    """The place of the first of these rows among all."""

    @classmethod
    def empty(cls, length: int) -> Located:
        """Return the locations of no rows."""
        no = np.empty(0, np.int64)
        return cls(no, length, no.astype(np.int32), no, no)

    def __getitem__(self, part: slice) -> Located:
        arrays = (self.sources[part], self.epochs[part], self.tokens[part])
        first, last, _ = part.indices(len(self.rows))
        pieces = {
            place - first: spans for place, spans in self.pieces.items() if first <= place < last
        }
        whole, before = self.whole or self, self.first + first
        return Located(self.rows[part], self.length, *arrays, pieces, whole, before)

    def reads(self) -> Reads:
        """Return the spans of tokens that the rows read: their inputs, and the token after them,
        which is the last target."""
        rows, starts = np.arange(len(self.rows)), self.tokens
        if not self.pieces:
            return Reads(rows, np.zeros_like(rows), starts, starts + (self.length + 1))
        several = sorted(self.pieces)
        counts = np.ones_like(rows)
        counts[several] = [len(self.pieces[row]) for row in several]
        spans = np.repeat(np.stack([starts, starts + self.length], axis=1), counts, axis=0)
        spans[np.isin(np.repeat(rows, counts), several)] = np.concatenate(
            [self.pieces[row] for row in several]
        )
        lengths, firsts = spans[:, 1] - spans[:, 0], np.cumsum(counts) - counts
        before = np.cumsum(lengths) - lengths
        places = before - np.repeat(before[firsts], counts)
        ends = spans[:, 1].copy()
        ends[firsts + counts - 1] += 1
        return Reads(np.repeat(rows, counts), places, spans[:, 0], ends)

    def spans(self, place: int) -> list[tuple[int, int]]:
        """Return the spans of tokens [start, end) that are the inputs of a row, in their order."""
        if place in self.pieces:
            return [(start, end) for start, end in self.pieces[place].tolist()]
        first = int(self.tokens[place])
        return [(first, first + self.length)]


@dataclass(frozen=True, eq=False)
class Reads:
    """Spans of tokens that rows read, row by row."""

    rows: Int64
    """The place of each span's row among the rows."""
    places: Int64
    """Inputs of the row before the span."""
    starts: Int64
    ends: Int64
    """One past the last input; in a row's last span one past the last target."""


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive phases of one sequence length, with the position of each source at its start."""

    first_row: int
    end_row: int
    length: int
    starts: tuple[Position, ...]
    counts: Int64
    """Rows drawn from each source between the plan's start and the span's."""
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
    """The first row that it cannot fill."""
    why: str


class Stream:
    """The rows of a plan, located in their sources."""

    def __init__(self, plan: Plan, *, goes_on: bool = False) -> None:
        """`goes_on`: the plan is the beginning of a fair one; rows of another length follow."""
        self.plan = plan
        fair = plan.fair or goes_on
        self.assignment = _fair(plan, goes_on=goes_on) if fair else _assignment(plan)
        self.spans = self._spans()

    def locate(self, rows: Int64) -> Located:
        """Locate rows, which must have one length."""
        span = self.span_at(int(rows[0]))
        assert rows.min() >= span.first_row and rows.max() < span.end_row, "rows of two lengths"
        sources, draws = self.assignment.locate(rows - self.plan.first_row)
        located = span.draws.locate(sources, draws - span.counts[sources])
        return Located(rows, span.length, sources, *located)

    def locate_blocks(self, blocks: Iterable[Int64]) -> Iterator[Located]:
        """Locate blocks of rows, each of one length; about AHEAD rows are located by one call."""
        for batch in self._batches(blocks):
            located, first = self.locate(np.concatenate(batch)), 0
            for block in batch:
                yield located[first : first + len(block)]
                first += len(block)

    def _batches(self, blocks: Iterable[Int64]) -> Iterator[list[Int64]]:
        """Group blocks of one length into batches of about AHEAD rows; the first ones are short, so
        that training starts early."""
        batch: list[Int64] = []
        rows = last = 0
        limit = AHEAD // 32
        for block in blocks:
            if batch and (rows + len(block) > limit or block[0] >= last):
                yield batch
                batch, rows, limit = [], 0, min(2 * limit, AHEAD)
            if not batch:
                last = self.span_at(int(block[0])).end_row
            batch.append(block)
            rows += len(block)
        if batch:
            yield batch

    def rows_with(self, source: int, start: int, end: int) -> Int64:
        """Return the rows, in order, with an input among the tokens [start, end) of a source."""
        order = self.plan.sources[source].order
        rows = [np.empty(0, np.int64)]
        for span in self.spans:
            position, before = span.starts[source], int(span.counts[source])
            drawn = int(self.counts(span.end_row)[source]) - before
            if not drawn:
                continue
            last = order.advance(position, span.length, drawn - 1).epoch
            passed = -position.row
            for epoch in range(position.epoch, last + 1):
                at = position if epoch == position.epoch else Position(epoch=epoch)
                draws = passed + order.rows_with(at, span.length, start, end)
                draws = draws[(draws >= 0) & (draws < drawn)]
                rows.append(self.assignment.rows_of(source, before + draws))
                passed += order.rows(epoch, span.length, at.cuts)
        return np.sort(np.concatenate(rows)) + self.plan.first_row

    def counts(self, row: int) -> Int64:
        """Return the rows of each source between the plan's start and `row`."""
        return self.assignment.counts(row - self.plan.first_row)

    def about(self, row: int) -> Int64:
        """Return `counts(row)` to within a row; quick, for pictures."""
        if isinstance(self.assignment, Eras):
            return self.assignment.about(row - self.plan.first_row)
        return self.counts(row)

    def positions(self, row: int) -> tuple[Position, ...]:
        """Return the position of each source before `row`, in rows of the length before it."""
        span = self.span_at(max(row - 1, self.plan.first_row))
        drawn = self.counts(row) - span.counts
        return tuple(
            source.order.advance(start, span.length, int(count))
            for source, start, count in zip(self.plan.sources, span.starts, drawn, strict=True)
        )

    def debts(self, row: int) -> list[Fraction]:
        """Return the tokens that each source is owed before `row`."""
        return self.assignment.debts(row - self.plan.first_row)

    def shortages(self) -> Iterator[Shortage]:
        """Yield the sources that the plan draws from for more epochs than `max_epochs`."""
        for index, source in enumerate(self.plan.sources):
            shortage = self._exhausted_at(index)
            if shortage is None:
                continue
            row, phase = shortage
            length = phase.seq_len
            epoch = source.order.rows(source.max_epochs, length)
            if not epoch:
                why = (
                    f"a sequence of {length:,} tokens is longer than the source "
                    f"({source.order.tokens:,} tokens)"
                )
            else:
                needed = int(self.counts(phase.end_row)[index] - self.counts(row)[index])
                why = (
                    f"runs dry at row {row:,}: its {source.max_epochs} "
                    f"epoch{'s' * (source.max_epochs > 1)} of {epoch * length:,} tokens are used "
                    f"up, and the phase wants {needed * length:,} tokens more"
                )
            yield Shortage(source.name, phase.name, row, why)

    def _exhausted_at(self, index: int) -> tuple[int, Phase] | None:
        """Return the first row that needs an epoch beyond `max_epochs`, and its phase."""
        source = self.plan.sources[index]
        for span in self.spans:
            start = span.starts[index]
            last = int(self.counts(span.end_row)[index] - span.counts[index])
            supply = source.order.rows_left(start, span.length, source.max_epochs)
            if last <= supply:
                continue
            wanted = span.counts[index] + supply
            low, high = span.first_row, span.end_row
            while high - low > 1:  # counts(low) <= wanted < counts(high)
                middle = (low + high) // 2
                if self.counts(middle)[index] <= wanted:
                    low = middle
                else:
                    high = middle
            return low, self.plan.phase_at(low)
        return None

    def span_at(self, row: int) -> Span:
        return next(span for span in reversed(self.spans) if span.first_row <= row)

    def _spans(self) -> list[Span]:
        plan = self.plan
        edges = [plan.first_row]
        lengths = [plan.phases[0].seq_len]
        for phase in plan.phases[1:]:
            if phase.seq_len != lengths[-1]:
                edges.append(phase.first_row)
                lengths.append(phase.seq_len)
        edges.append(plan.end_row)
        orders = tuple(source.order for source in plan.sources)
        positions = [source.start for source in plan.sources]
        counts = np.zeros(len(plan.sources), np.int64)
        spans = []
        for index, (first, last) in enumerate(pairwise(edges)):
            length = lengths[index]
            spans.append(Span(first, last, length, tuple(positions), counts, orders))
            if last == plan.end_row:
                break
            counts = self.counts(last)
            drawn = counts - spans[-1].counts
            for number, source in enumerate(plan.sources):
                order = source.order
                here = order.advance(positions[number], length, int(drawn[number]))
                positions[number] = order.change_length(here, length, lengths[index + 1])
        return spans


def _assignment(plan: Plan) -> Assignment:
    segments = plan.segments()
    tables = None
    if most_simulated(segments) > KEPT_ROWS:
        tables = kept(plan.hash, lambda: simulate(segments)[0], Tables)
    return Assignment(segments, tables)


def _fair(plan: Plan, *, goes_on: bool) -> Eras:
    name = f"{plan.hash}-beginning" if goes_on else plan.hash

    def keep(number: int, owed: Owed, compute: Callable[[], SlowTable]) -> SlowTable:
        if owed.rows <= KEPT_ROWS:
            return compute()
        return kept(f"{name}-era-{number}", compute, SlowTable)

    lines = plan.lines()
    debts = plan.debts or (Fraction(0),) * len(plan.sources)
    settles = goes_on or plan.parent is not None or len(lines) > 1
    return Eras(lines, debts, settles=settles, keep=keep)
