"""Why no layout has the settings that `--explain` asks for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ...grid.grid import Shape, refusal, shapes, tried
from ...grid.wanted import Wanted, may_be
from ...prices.layers import Costs
from ..outcome import Outcome

SHOWN = 5
"""Reasons that are named."""


def reasons(costs: Costs, gpus: int, outcome: Outcome, wanted: Wanted) -> list[str]:
    """Return why a search for these settings found no layout: the first of these that there are.

    1. The degrees contradict the devices, the model or the rows.
    2. The engine refuses all layouts that have the settings.
    3. The checks of layouts refuse them.
    4. No layout has the settings together.
    """
    if found := [*_of_degrees(costs, gpus, wanted)]:
        return found
    refused = Counter(
        reason
        for shape in _shapes(costs, gpus, wanted)
        for grid in tried(shape, costs.model, costs.machine.per_node)
        if _has(grid.words(), wanted)
        and (reason := refusal(grid, gpus, costs.precision)) is not None
    )
    known = refused or outcome.refused
    if known:
        return [reason for reason, _ in known.most_common(SHOWN)]
    return [*_of_values(costs, gpus, wanted)] or ["no layout has these settings together"]


def _of_degrees(costs: Costs, gpus: int, wanted: Wanted) -> Iterator[str]:
    """Yield each condition that the wanted degrees break, whatever the others are."""
    sizes = {name: wanted[name] for name in ("pp", "dp", "cp", "tp", "ep") if name in wanted}
    if wrong := [f"{name}={size}" for name, size in sizes.items() if not _is_degree(size)]:
        yield f"{', '.join(wrong)}: a degree is a number of at least 1"
        return
    model, per_node = costs.model, costs.machine.per_node
    split = {name: size for name, size in sizes.items() if name != "ep"}
    ranks, words = math.prod(split.values()), " × ".join(f"{n}={size}" for n, size in split.items())
    product = f" = {ranks}" if len(split) > 1 else ""
    if gpus % ranks:
        yield f"{words}{product} does not divide {gpus} devices"
    elif len(split) == 4 and ranks < gpus:
        yield f"{words}{product} leaves devices without work: there are {gpus}"
    pp, cp, tp = (sizes.get(name, 1) for name in ("pp", "cp", "tp"))
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


def _of_values(costs: Costs, gpus: int, wanted: Wanted) -> Iterator[str]:
    """Yield, for each setting, the values that it has in the layouts with all others."""
    every = [
        grid.words() for shape in _shapes(costs, gpus, {}) for grid in costs.variants(shape, gpus)
    ]
    for name, value in wanted.items():
        others = {other: wanted[other] for other in wanted if other != name}
        beside = [words for words in every if _has(words, others)]
        values = {words[name] for words in beside if name in words}
        words = " and ".join(f"{other}={wanted[other]}" for other in others)
        which = f"with {words}" if words else f"of {gpus} devices"
        if beside:
            known = ", ".join(map(str, sorted(values, key=lambda each: (str(type(each)), each))))
            yield f"{name}={value}: layouts {which} have {known or 'no such setting'}"


def _shapes(costs: Costs, gpus: int, wanted: Wanted) -> Iterator[Shape]:
    """Yield the shapes that the checks accept and that may have these settings."""
    for shape, *_ in shapes(costs.model, gpus, costs.machine.per_node, costs.phase):
        if shape is not None and may_be(shape, wanted):
            yield shape


def _has(words: Wanted, wanted: Wanted) -> bool:
    return all(words.get(name) == value for name, value in wanted.items())
