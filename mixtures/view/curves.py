"""A plan's curves over its tokens: learning rate; shares, tokens and epochs by source."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...dataplane.arrays import Float64, Int64
from ...dataplane.order.plan import Plan
from ...dataplane.order.steered import decided_phases
from ...dataplane.order.stream import Stream
from ..learning_rate import learning_rate_at
from ..lr_shapes import load_shape
from ..planning.continuation import epochs_consumed

POINTS = 400
"""Points per curve, without the edges of phases."""
MAX_SOURCES = 12
"""Maximum number of curves; beyond it, the smallest sources share one."""


@dataclass(frozen=True)
class PhaseSpan:
    """A phase's tokens, counted over the whole plan."""

    phase: str
    first_token: int
    end_token: int
    seq_len: int


@dataclass(frozen=True)
class Curves:
    """A plan's curves, which `mixtures plot` draws, or prints with --json."""

    phases: list[PhaseSpan]
    sources: list[str]
    max_epochs: list[int | None]
    share_edges: list[int]
    """Token numbers between which shares are constant."""
    shares: list[list[float]]
    """[source][stretch]."""
    lr_tokens: list[int]
    lr: list[float]
    """In multiples of the run's peak."""
    tokens: list[int]
    """Token numbers of the points in `taken` and `epochs`."""
    taken: list[list[int]]
    """Tokens since the start of the plan, [source][point]."""
    epochs: list[list[float]]
    """Epochs consumed, including those before the plan, [source][point]."""

    def json_data(self) -> dict[str, Any]:
        """Return the curves as JSON data, with the key `last_token` for `end_token`."""
        data = asdict(self)
        keys = {"end_token": "last_token"}
        data["phases"] = [
            {keys.get(name, name): value for name, value in phase.items()}
            for phase in data["phases"]
        ]
        return data


def compute_curves(stream: Stream) -> Curves:
    """Compute a plan's curves; merges the smallest of many sources into one."""
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
    tokens, taken = _count_taken(stream)
    sizes = np.array([source.order.tokens for source in plan.sources], np.float64)
    initial_epochs = np.array(
        [
            epochs_consumed(source.order, source.start, plan.phases[0].seq_len)
            for source in plan.sources
        ]
    )
    edges, shares = _average_shares(plan)
    lr_tokens, lr = _learning_rates(plan)
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
            (
                taken[group].sum(axis=0) / sizes[group].sum()
                + _weighted_mean(initial_epochs[group], sizes[group])
            ).tolist()
            for group in groups
        ],
    )


def _weighted_mean(values: Float64, weights: Float64) -> float:
    return float((values * weights).sum() / weights.sum())


def _count_taken(stream: Stream) -> tuple[list[int], Int64]:
    """Count the tokens taken at points, which include the edges of phases.

    Returns the points' token numbers, and the counts [source, point].
    """
    plan = stream.plan
    tokens: list[int] = []
    columns: list[Int64] = []
    taken_before = np.zeros(len(plan.sources), np.int64)
    for phase in plan.phases:
        num_points = max(2, round(POINTS * phase.tokens / plan.tokens))
        points = np.linspace(phase.first_row, phase.end_row, num_points).round()
        first_counts = stream.approximate_counts(phase.first_row)
        for row in sorted({int(point) for point in points}):
            counts = stream.approximate_counts(row) - first_counts
            columns.append(taken_before + counts * phase.seq_len)
            tokens.append(phase.first_token + (row - phase.first_row) * phase.seq_len)
        taken_before = columns[-1]
    return tokens, np.stack(columns, axis=1)


def _average_shares(plan: Plan) -> tuple[list[int], Float64]:
    """Return the edges of stretches, and the average shares [source, stretch] between them."""
    edges, columns = [plan.phases[0].first_token], []
    for phase in decided_phases(plan):
        for stretch in phase.stretches:
            for rows, shares in stretch.stairs:
                edges.append(edges[-1] + rows * phase.seq_len)
                columns.append(np.array(shares))
    return edges, np.stack(columns, axis=1)


def _learning_rates(plan: Plan) -> tuple[list[int], list[float]]:
    tokens, rates = [], []
    for phase in plan.phases:
        points = np.linspace(0, phase.tokens, max(50, POINTS * phase.tokens // plan.tokens))
        corners = load_shape(phase.lr).corners(phase.tokens)
        for token in sorted({int(point) for point in (*points, *corners)}):
            tokens.append(phase.first_token + token)
            rates.append(learning_rate_at(phase, token))
    return tokens, rates
