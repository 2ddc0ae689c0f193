"""Probes: variants of the best layout whose trials separate the hardware's figures.

The best layouts by prediction differ little. A probe changes a single thing: the share of
attention, launches, a step's overhead or a second forward pass, or the engine. So the correction
can tell these figures apart.
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
from .prices import PlanPricer

SHORTER = 4
"""Divisor for shorter rows."""
MIN_LENGTH = 16
"""Tokens in the shortest row."""
MAX_ROWS = 4
"""Rows in a larger micro-batch."""


def make_probes(
    best: LayoutPlan, pricer: PlanPricer, hardware: Hardware, budget: float
) -> list[LayoutPlan]:
    """Return probes with a single phase that fit into `budget` bytes."""
    probes = []
    for plan in (
        *_shorten_rows(best, pricer),
        *_halve_batch(best),
        *_resize_micro_batch(best),
        *_recompute_blocks(best),
        *_change_engine(best, pricer),
    ):
        [phase] = plan.planned.phases
        seconds, memory = pricer.price(plan, hardware, phase.seq_len, phase.batch_tokens)
        if memory > budget:
            continue
        planned = replace(plan.planned, phases=(replace(phase, seconds=seconds),))
        predicted = replace(
            plan.predicted, seconds=seconds, bound=seconds, memory=memory, by={}, memory_by={}
        )
        probes.append(replace(plan, planned=planned, predicted=predicted))
    return probes


def _shorten_rows(best: LayoutPlan, pricer: PlanPricer) -> Iterator[LayoutPlan]:
    """Yield the plan with shorter rows, where attention has a smaller share."""
    phase = min(best.planned.phases, key=lambda phase: phase.seq_len)
    length = phase.seq_len // SHORTER
    gpus, layout = best.planned.gpus, best.layout
    if length < MIN_LENGTH or phase.seq_len % SHORTER or length % (layout.tp * layout.cp):
        return
    if not any(problems(layout, gpus, pricer.model, [length])):
        yield _with_phase(best, replace(phase, seq_len=length))


def _halve_batch(best: LayoutPlan) -> Iterator[LayoutPlan]:
    """Yield the plan with half the rows in a step, where time outside passes has a larger share."""
    phase = best.planned.phases[0]
    rows = phase.batch_tokens // phase.seq_len
    if rows % (2 * best.layout.data_parallel(best.planned.gpus)) == 0:
        yield _with_phase(best, replace(phase, batch_tokens=phase.batch_tokens // 2))


def _resize_micro_batch(best: LayoutPlan) -> Iterator[LayoutPlan]:
    """Yield the plan with fewer or more rows in a micro-batch: launches change their share."""
    phase, layout = best.planned.phases[0], best.layout
    row_tokens = phase.seq_len // layout.cp
    rows = phase.batch_tokens // phase.seq_len // layout.data_parallel(best.planned.gpus)
    if best.micro_batch_tokens > row_tokens:
        yield _with_phase(replace(best, micro_batch_tokens=row_tokens), phase)
    elif rows > 1:
        tokens = min(rows, MAX_ROWS) * row_tokens
        yield _with_phase(replace(best, micro_batch_tokens=tokens), phase)


def _recompute_blocks(best: LayoutPlan) -> Iterator[LayoutPlan]:
    """Yield the plan with all blocks recomputed, unless it has that."""
    if any(span.recompute == "none" for span in best.layers):
        layers = tuple(replace(span, recompute="block") for span in best.layers)
        yield _with_phase(replace(best, layers=layers), best.planned.phases[0])


def _change_engine(best: LayoutPlan, pricer: PlanPricer) -> Iterator[LayoutPlan]:
    """Yield the plan with every engine of another kind, whose work in a step differs."""
    for name, kind in ENGINES.items():
        if name == best.engine.kind:
            continue
        engine = kind.fewest_messages()
        try:
            engine.check(best.layout, best.planned.gpus, PRECISIONS[pricer.run.precision])
        except LayoutError:
            continue
        layers = tuple(replace(span, reshard=None, shard=None) for span in best.layers)
        yield _with_phase(replace(best, engine=engine, layers=layers), best.planned.phases[0])


def _with_phase(plan: LayoutPlan, phase: PlannedPhase) -> LayoutPlan:
    return replace(plan, planned=replace(plan.planned, phases=(phase,)))
