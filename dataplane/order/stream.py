"""The stream: the plan as a function of the row number.

    row n → segment → (source, draw) → epoch, chunk, place → the first token of n in its source

World size, workers and batch size appear nowhere; restarting is calling it with another n.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..arrays import Int64
from .apportionment import Assignment
from .plan import Phase, Plan
from .source_order import Position

AHEAD = 2048
"""Rows that are located at once: the arithmetic costs little more for many than for one."""


@dataclass(frozen=True, eq=False)
class Located:
    """Where rows of one length have their tokens: row i reads [tokens[i], tokens[i] + length]."""

    rows: Int64
    length: int
    sources: npt.NDArray[np.int32]
    """Indices into the plan's sources."""
    epochs: Int64
    tokens: Int64

    @classmethod
    def nowhere(cls, length: int) -> Located:
        """No rows."""
        none = np.empty(0, np.int64)
        return cls(none, length, none.astype(np.int32), none, none)

    def __getitem__(self, part: slice) -> Located:
        arrays = (self.sources[part], self.epochs[part], self.tokens[part])
        return Located(self.rows[part], self.length, *arrays)


@dataclass(frozen=True, eq=False)
class Span:
    """Phases side by side with one sequence length, and where each source stands as it begins."""

    first_row: int
    last_row: int
    length: int
    starts: tuple[Position, ...]
    counts: Int64
    """Draws of each source before the span, since the plan began."""


@dataclass(frozen=True)
class Shortage:
    """A source that cannot give what is asked of it."""

    source: str
    phase: str
    row: int
    """The first that it cannot give."""
    why: str


class Stream:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.assignment = Assignment(plan.segments(), plan.debts or None)
        self.spans = self._spans()

    def locate(self, rows: Int64) -> Located:
        """Where rows lie. All of them must be of one length."""
        span = self.span_at(int(rows[0]))
        assert rows.min() >= span.first_row and rows.max() < span.last_row, "rows of two lengths"
        sources, draws = self.assignment.locate(rows - self.plan.first_row)
        epochs = np.empty(len(rows), np.int64)
        tokens = np.empty(len(rows), np.int64)
        for index in np.unique(sources).tolist():
            chosen = sources == index
            epochs[chosen], tokens[chosen] = self.plan.sources[index].order.offsets(
                span.starts[index], span.length, draws[chosen] - span.counts[index]
            )
        return Located(rows, span.length, sources, epochs, tokens)

    def locate_each(self, parts: Iterable[Int64]) -> Iterator[Located]:
        """Where many parts of rows lie, each of one length: what comes soon is located together."""
        for together in self._together(parts):
            located, first = self.locate(np.concatenate(together)), 0
            for part in together:
                yield located[first : first + len(part)]
                first += len(part)

    def _together(self, parts: Iterable[Int64]) -> Iterator[list[Int64]]:
        """Parts of one length, about AHEAD rows at a time."""
        found: list[Int64] = []
        rows = last = 0
        for part in parts:
            if found and (rows + len(part) > AHEAD or part[0] >= last):
                yield found
                found, rows = [], 0
            if not found:
                last = self.span_at(int(part[0])).last_row
            found.append(part)
            rows += len(part)
        if found:
            yield found

    def rows_with(self, source: int, start: int, end: int) -> Int64:
        """The rows whose inputs hold one of the tokens [start, end) of a source, in order."""
        order = self.plan.sources[source].order
        found = [np.empty(0, np.int64)]
        for span in self.spans:
            position, before = span.starts[source], int(span.counts[source])
            drawn = int(self.counts(span.last_row)[source]) - before
            if not drawn:
                continue
            last = order.advance(position, span.length, drawn - 1).epoch
            passed = -position.row
            for epoch in range(position.epoch, last + 1):
                draws = passed + order.rows_with(epoch, span.length, start, end)
                draws = draws[(draws >= 0) & (draws < drawn)]
                found.append(self.assignment.rows_of(source, before + draws))
                passed += order.rows(epoch, span.length)
        return np.sort(np.concatenate(found)) + self.plan.first_row

    def counts(self, row: int) -> Int64:
        """Rows of each source before `row`, since the plan began."""
        return self.assignment.counts(row - self.plan.first_row)

    def positions(self, row: int) -> tuple[Position, ...]:
        """Where each source stands when `row` is next, in rows of the length before it."""
        span = self.span_at(max(row - 1, self.plan.first_row))
        drawn = self.counts(row) - span.counts
        return tuple(
            source.order.advance(start, span.length, int(count))
            for source, start, count in zip(self.plan.sources, span.starts, drawn, strict=True)
        )

    def debts(self, row: int) -> list[Fraction]:
        """Tokens that each source is owed when `row` is next."""
        return self.assignment.debts(row - self.plan.first_row)

    def shortages(self) -> Iterator[Shortage]:
        """Where the plan asks a source for more epochs than it may give."""
        for index, source in enumerate(self.plan.sources):
            dry = self._runs_dry(index)
            if dry is None:
                continue
            row, phase = dry
            length = phase.seq_len
            epoch = source.order.rows(source.max_epochs, length)
            if not epoch:
                why = (
                    f"a sequence of {length:,} tokens is longer than the source "
                    f"({source.order.tokens:,} tokens)"
                )
            else:
                needed = int(self.counts(phase.last_row)[index] - self.counts(row)[index])
                why = (
                    f"runs dry at row {row:,}: its {source.max_epochs} "
                    f"epoch{'s' * (source.max_epochs > 1)} of {epoch * length:,} tokens are used "
                    f"up, and the phase wants {needed * length:,} tokens more"
                )
            yield Shortage(source.name, phase.name, row, why)

    def _runs_dry(self, index: int) -> tuple[int, Phase] | None:
        """The first row that would need an epoch past the source's cap, and its phase."""
        source = self.plan.sources[index]
        for span in self.spans:
            start = span.starts[index]
            last = int(self.counts(span.last_row)[index] - span.counts[index])
            supply = -start.row + sum(
                source.order.rows(epoch, span.length)
                for epoch in range(start.epoch, min(start.epoch + 2, source.max_epochs))
            )
            more = source.max_epochs - start.epoch - 2
            if more > 0:
                supply += more * source.order.rows(start.epoch + 1, span.length)
            if last <= max(supply, 0):
                continue
            wanted = span.counts[index] + max(supply, 0)
            low, high = span.first_row, span.last_row
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
        edges.append(plan.last_row)
        positions = [source.start for source in plan.sources]
        counts = np.zeros(len(plan.sources), np.int64)
        spans = []
        for index, (first, last) in enumerate(pairwise(edges)):
            length = lengths[index]
            spans.append(Span(first, last, length, tuple(positions), counts))
            if last == plan.last_row:
                break
            counts = self.counts(last)
            drawn = counts - spans[-1].counts
            for number, source in enumerate(plan.sources):
                here = source.order.advance(positions[number], length, int(drawn[number]))
                there = source.order.next_window(here, length)
                positions[number] = source.order.convert(there, length, lengths[index + 1])
        return spans
