"""The price of a layout that somebody has chosen: a plan's, or a run's."""

from __future__ import annotations

from collections.abc import Sequence

from ...console.errors import LayoutError, PlanError
from ...models.config.options.recompute import Rule, expand_rules
from ...trainer.engines.config import EngineConfig
from ...trainer.layout import checks
from ...trainer.layout.cuts import Cuts
from ...trainer.layout.stages import choose_cuts
from ...trainer.run.config import RunConfig
from ..division.bounds import quick_bound
from ..division.problem import price_division
from ..grid.grid import Grid, make_grid
from ..prices.layers import Costs
from .outcome import Candidate

Key = tuple[Rule, bool | None, bool]
"""A layer's choice: recompute rule, whether it reshards, whether tensor ranks work as context
ranks."""


def price_layout(
    costs: Costs,
    grid: Grid,
    budget: float,
    *,
    cuts: Cuts,
    keys: Sequence[Key],
    engine: EngineConfig,
) -> Candidate:
    """Price a layout whose layers run as `keys` say. Bytes follow from `engine`, which may have
    shards of single layers."""
    problem = costs.problem(grid, budget, all_choices=True)
    choices = []
    for layer, (kind, key) in enumerate(zip(problem.layers, keys, strict=True)):
        choices_by_key = {choice.name.key: choice for choice in problem.kinds[kind].choices}
        if key not in choices_by_key:
            raise PlanError(
                f"the planner has no price for the choices of layer {layer} "
                f"(recompute {key[0]}, reshard {key[1]})",
                hint="choose among those that `trainer plan` writes",
            )
        choices.append(choices_by_key[key])
    division = price_division(problem, cuts, choices)
    rules = [rule for rule, _, _ in keys]
    sequence = [sequence for _, _, sequence in keys]
    timelines = costs.memory.timelines(grid, engine, cuts, rules, sequence)
    return Candidate(grid, problem, division.bounded(quick_bound(problem)), timelines)


def price_run(costs: Costs, run: RunConfig, gpus: int, budget: float) -> Candidate:
    """Price a run's own layout in a phase: its engine, rows, cuts and recompute rules. Raise
    LayoutError if the run would not start."""
    model, phase, layout = costs.model, costs.phase, run.layout
    checks.check(layout, gpus, model, [phase.seq_len])
    run.engine.check(layout, gpus, costs.precision)
    dp = layout.data_parallel(gpus)
    if phase.whole.batch_rows < dp:
        raise LayoutError(
            f"a step has {phase.whole.batch_rows} rows, and {dp} data-parallel ranks need one each",
            hint="use fewer devices, or a larger batch",
        )
    grid = make_grid(layout, run.engine, run.micro_batch_tokens, gpus, phase)
    reshards: list[bool | None] = [None] * len(model.layers)
    for span in run.engine.layer_shards:
        if not span.reshard:
            first, last = span.layers
            reshards[first : last + 1] = [False] * (last + 1 - first)
    rules = expand_rules(run.recompute, len(model.layers))
    return price_layout(
        costs,
        grid,
        budget,
        cuts=choose_cuts(layout, model, phase.seq_len),
        keys=[(rule, reshard, False) for rule, reshard in zip(rules, reshards, strict=True)],
        engine=run.engine,
    )
