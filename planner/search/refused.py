"""Why no layout has the settings that `--explain` asks for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..grid.grid import LayoutShape, enumerate_shapes, enumerate_unchecked_grids, find_refusal
from ..grid.settings import Settings, has_settings, may_match_shape
from ..prices.layers import Costs
from ..prices.missing import refuse_offload
from .outcome import SearchOutcome

SHOWN = 5
"""Maximum number of reasons named."""


def explain_refusal(
    costs: Costs, gpus: int, outcome: SearchOutcome, settings: Settings
) -> list[str]:
    """Return why a search for these settings found no layout, by the first reason that holds.

    1. The degrees contradict the devices, the model or the rows.
    2. The engine refuses all layouts that have the settings.
    3. The checks of layouts refuse them.
    4. No layout has the settings together.
    """
    if contradictions := [*_check_degrees(costs, gpus, settings)]:
        return contradictions
    if "offload" in settings and (reason := refuse_offload(costs)) is not None:
        return [f"offload={settings['offload']}: {reason}"]
    engine_refusals = Counter(
        reason
        for shape in _accepted_shapes(costs, gpus, settings)
        for grid in enumerate_unchecked_grids(shape, costs.model, costs.machine.per_node)
        if has_settings(grid.settings(), settings)
        and (reason := find_refusal(grid, gpus, costs.precision)) is not None
    )
    refusals = engine_refusals or outcome.refused
    if refusals:
        return [reason for reason, _ in refusals.most_common(SHOWN)]
    conflicts = [*_describe_conflicts(costs, gpus, settings)]
    return conflicts or ["no layout has these settings together"]


def _check_degrees(costs: Costs, gpus: int, settings: Settings) -> Iterator[str]:
    """Yield every condition that the requested degrees break, for any values of the rest."""
    degrees = ("pp", "dp", "cp", "tp", "ep")
    sizes = {degree: settings[degree] for degree in degrees if degree in settings}
    if invalid := [f"{degree}={n}" for degree, n in sizes.items() if not _is_degree(n)]:
        yield f"{', '.join(invalid)}: a degree is a number of at least 1"
        return
    model, per_node = costs.model, costs.machine.per_node
    split = {degree: size for degree, size in sizes.items() if degree != "ep"}
    ranks, words = math.prod(split.values()), " × ".join(f"{d}={size}" for d, size in split.items())
    product = f" = {ranks}" if len(split) > 1 else ""
    if gpus % ranks:
        yield f"{words}{product} does not divide {gpus} devices"
    elif len(split) == 4 and ranks < gpus:
        yield f"{words}{product} leaves devices without work: there are {gpus}"
    pp, cp, tp = (sizes.get(degree, 1) for degree in ("pp", "cp", "tp"))
    if tp > per_node:
        yield f"tp={tp} is more than the {per_node} devices of a node"
    if costs.module is not None and tp * cp > 1:
        yield "modules have no tensor or context parallelism"
    elif costs.phase.seq_len % (tp * cp):
        yield f"tp × cp = {tp * cp} does not divide the {costs.phase.seq_len:,} tokens of a row"
    if pp > len(model.layers):
        yield f"pp={pp} is more than the {len(model.layers)} layers"
    if gpus % pp == 0:
        yield from model.ep_problems(sizes.get("ep", 1), tp, gpus // pp)


def _is_degree(size: Any) -> bool:
    return isinstance(size, int) and size >= 1


def _describe_conflicts(costs: Costs, gpus: int, settings: Settings) -> Iterator[str]:
    """Yield, for each setting, its values in the layouts that have the remaining settings."""
    layouts = [
        grid.settings()
        for shape in _accepted_shapes(costs, gpus, {})
        for grid in costs.grids(shape, gpus)
    ]
    for setting, value in settings.items():
        remaining = {key: settings[key] for key in settings if key != setting}
        matches = [layout for layout in layouts if has_settings(layout, remaining)]
        values = {layout[setting] for layout in matches if setting in layout}
        words = " and ".join(f"{key}={settings[key]}" for key in remaining)
        clause = f"with {words}" if words else f"of {gpus} devices"
        if matches:
            known = ", ".join(map(str, sorted(values, key=lambda v: (str(type(v)), v))))
            yield f"{setting}={value}: layouts {clause} have {known or 'no such setting'}"


def _accepted_shapes(costs: Costs, gpus: int, settings: Settings) -> Iterator[LayoutShape]:
    """Yield the shapes that pass the checks and do not contradict the settings."""
    for shape, *_ in enumerate_shapes(costs.model, gpus, costs.machine.per_node, costs.phase):
        if shape is not None and may_match_shape(shape, settings):
            yield shape
