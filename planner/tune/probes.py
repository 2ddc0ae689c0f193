"""Runs that separate the figures: the best layout, with one thing changed in each.

Layouts that are the best by prediction differ little. In these runs attention, launches, the rest
of a step and the second forward pass have other shares, or the engine is the other one, so that the
correction finds each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...console.errors import LayoutError
from ...models.config.options.precision import PRECISIONS
from ...trainer.engines import ENGINES
from ...trainer.layout.checks import problems
from ...trainer.run.layout_plan import LayoutPlan, PlannedPhase
from ..hardware import Hardware
from .prices import Pricing

SHORTER = 4
"""Part of a row that a shorter one has."""
LEAST = 16
"""Tokens of the shortest row."""
ROWS = 4
"""Rows of a larger micro-batch."""


def probes(
    best: LayoutPlan, pricing: Pricing, hardware: Hardware, budget: float
) -> list[LayoutPlan]:
    """Return the plans of these runs that fit into `budget` bytes, each with one phase."""
    found = []
    for plan in (
        *_shorter(best, pricing),
        *_fewer(best),
        *_other_rows(best),
        *_recomputed(best),
        *_other_engine(best, pricing),
    ):
        [phase] = plan.planned.phases
        seconds, memory = pricing.price(plan, hardware, phase.seq_len, phase.batch_tokens)
        if memory > budget:
            continue
        planned = replace(plan.planned, phases=(replace(phase, seconds=seconds),))
        predicted = replace(
            plan.predicted, seconds=seconds, bound=seconds, memory=memory, by={}, memory_by={}
        )
        found.append(replace(plan, planned=planned, predicted=predicted))
    return found


def _shorter(best: LayoutPlan, pricing: Pricing) -> Iterator[LayoutPlan]:
    """Yield the plan with shorter rows: attention has a smaller share."""
    phase = min(best.planned.phases, key=lambda each: each.seq_len)
    length = phase.seq_len // SHORTER
    gpus, layout = best.planned.gpus, best.layout
    if length < LEAST or phase.seq_len % SHORTER or length % (layout.tp * layout.cp):
        return
    if not any(problems(layout, gpus, pricing.model, [length])):
        yield _of(best, replace(phase, seq_len=length))


def _fewer(best: LayoutPlan) -> Iterator[LayoutPlan]:
    """Yield the plan with half of the rows in a step: what a step takes outside its passes has a
    larger share."""
    phase = best.planned.phases[0]
    rows = phase.batch_tokens // phase.seq_len
    if rows % (2 * best.layout.data_parallel(best.planned.gpus)) == 0:
        yield _of(best, replace(phase, batch_tokens=phase.batch_tokens // 2))


def _other_rows(best: LayoutPlan) -> Iterator[LayoutPlan]:
    """Yield the plan with fewer or more rows in a micro-batch: launches have another share."""
    phase, layout = best.planned.phases[0], best.layout
    one = phase.seq_len // layout.cp
    rows = phase.batch_tokens // phase.seq_len // layout.data_parallel(best.planned.gpus)
    if best.micro_batch_tokens > one:
        yield _of(replace(best, micro_batch_tokens=one), phase)
    elif rows > 1:
        yield _of(replace(best, micro_batch_tokens=min(rows, ROWS) * one), phase)


def _recomputed(best: LayoutPlan) -> Iterator[LayoutPlan]:
    """Yield the plan with a second forward pass of all blocks, if it does not have one."""
    if any(span.recompute == "none" for span in best.layers):
        layers = tuple(replace(span, recompute="block") for span in best.layers)
        yield _of(replace(best, layers=layers), best.planned.phases[0])


def _other_engine(best: LayoutPlan, pricing: Pricing) -> Iterator[LayoutPlan]:
    """Yield the plan with the other kinds of engines: their own work in a step is another."""
    for name, kind in ENGINES.items():
        if name == best.engine.kind:
            continue
        engine = kind.fewest_messages()
        try:
            engine.check(best.layout, best.planned.gpus, PRECISIONS[pricing.run.precision])
        except LayoutError:
            continue
        layers = tuple(replace(span, reshard=None, shard=None) for span in best.layers)
        yield _of(replace(best, engine=engine, layers=layers), best.planned.phases[0])


def _of(plan: LayoutPlan, phase: PlannedPhase) -> LayoutPlan:
    return replace(plan, planned=replace(plan.planned, phases=(phase,)))
