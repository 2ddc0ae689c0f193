"""Curves of a plan over its tokens: shares, learning rate, tokens and epochs of each source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dataplane.arrays import Float64, Int64
from ...dataplane.order.plan import Plan
from ...dataplane.order.stream import Stream
from ..learning_rate import lr_at
from ..lr_shapes import shape_of
from ..planning.continuation import epochs_consumed

POINTS = 400
"""Number of points of each curve, without the edges of phases."""
MAX_SOURCES = 12
"""Maximum number of curves; beyond it, the smallest sources are drawn as one."""


@dataclass(frozen=True)
class PhaseSpan:
    """The tokens of a phase, counted over the whole plan."""

    phase: str
    first_token: int
    end_token: int
    seq_len: int


@dataclass(frozen=True)
class Curves:
    """Curves of a plan, as `mixtures plot` draws them and prints them with --json."""

    phases: list[PhaseSpan]
    sources: list[str]
    max_epochs: list[int | None]
    share_edges: list[int]
    """Token numbers; shares are constant between two of them."""
    shares: list[list[float]]
    """Share of each source in each stretch: [source][stretch]."""
    lr_tokens: list[int]
    lr: list[float]
    """In multiples of the run's peak."""
    tokens: list[int]
    """Token numbers at which `taken` and `epochs` are given."""
    taken: list[list[int]]
    """Tokens of each source since the start of the plan: [source][point]."""
    epochs: list[list[float]]
    """Epochs of each source, including those consumed before the plan: [source][point]."""

    def as_data(self) -> dict[str, Any]:
        phases = [
            {
                "phase": span.phase,
                "first_token": span.first_token,
                "last_token": span.end_token,
                "seq_len": span.seq_len,
            }
            for span in self.phases
        ]
        return {**vars(self), "phases": phases}


def curves(stream: Stream) -> Curves:
    """Return the curves of a plan; the smallest of many sources are merged into one."""
    plan = stream.plan
    drawn = stream.counts(plan.end_row)
    order = [int(index) for index in np.argsort(-drawn, kind="stable") if drawn[index]]
    groups = [[index] for index in order]
    if len(groups) > MAX_SOURCES:
        groups = [*groups[: MAX_SOURCES - 1], order[MAX_SOURCES - 1 :]]
    names = [
        plan.sources[group[0]].name if len(group) == 1 else f"{len(group)} others"
        for group in groups
    ]
    rows = _rows(plan)
    taken, tokens = _taken(stream, rows)
    sizes = np.array([source.order.tokens for source in plan.sources], np.float64)
    before = np.array(
        [
            epochs_consumed(source.order, source.start, plan.phases[0].seq_len)
            for source in plan.sources
        ]
    )
    edges, shares = _shares(plan)
    lr_tokens, lr = _rates(plan)
    return Curves(
        phases=[
            PhaseSpan(phase.name, phase.first_token, phase.end_token, phase.seq_len)
            for phase in plan.phases
        ],
        sources=names,
        max_epochs=[
            plan.sources[group[0]].max_epochs if len(group) == 1 else None for group in groups
        ],
        share_edges=edges,
        shares=[shares[group].sum(axis=0).tolist() for group in groups],
        lr_tokens=lr_tokens,
        lr=lr,
        tokens=tokens,
        taken=[taken[group].sum(axis=0).tolist() for group in groups],
        epochs=[
            (taken[group].sum(axis=0) / sizes[group].sum() + _mean(before, sizes, group)).tolist()
            for group in groups
        ],
    )


def _mean(values: Float64, weights: Float64, group: Sequence[int]) -> float:
    return float((values[group] * weights[group]).sum() / weights[group].sum())


def _rows(plan: Plan) -> list[list[int]]:
    """Return the rows at which the curves are evaluated, by phase, with the phase's edges."""
    by_phase = []
    for phase in plan.phases:
        points = max(2, round(POINTS * phase.tokens / plan.tokens))
        rows = np.linspace(phase.first_row, phase.end_row, points).round()
        by_phase.append(sorted({int(row) for row in rows}))
    return by_phase


def _taken(stream: Stream, rows: Sequence[Sequence[int]]) -> tuple[Int64, list[int]]:
    """Return the tokens taken, [source, point], and the token numbers of the points."""
    columns: list[Int64] = []
    tokens: list[int] = []
    so_far = np.zeros(len(stream.plan.sources), np.int64)
    for phase, phase_rows in zip(stream.plan.phases, rows, strict=True):
        first = stream.approximate_counts(phase.first_row)
        for row in phase_rows:
            columns.append(so_far + (stream.approximate_counts(row) - first) * phase.seq_len)
            tokens.append(phase.first_token + (row - phase.first_row) * phase.seq_len)
        so_far = columns[-1]
    return np.stack(columns, axis=1), tokens


def _shares(plan: Plan) -> tuple[list[int], Float64]:
    edges, columns = [plan.phases[0].first_token], []
    for phase in plan.phases:
        for stretch in phase.stretches:
            for rows, shares in stretch.stairs:
                edges.append(edges[-1] + rows * phase.seq_len)
                columns.append(np.array(shares))
    return edges, np.stack(columns, axis=1)


def _rates(plan: Plan) -> tuple[list[int], list[float]]:
    tokens, rates = [], []
    for phase in plan.phases:
        points = np.linspace(0, phase.tokens, max(50, POINTS * phase.tokens // plan.tokens))
        corners = shape_of(phase.lr).corners(phase.tokens)
        for token in sorted({int(point) for point in (*points, *corners)}):
            tokens.append(phase.first_token + token)
            rates.append(lr_at(phase, token))
    return tokens, rates
