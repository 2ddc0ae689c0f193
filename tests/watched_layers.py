"""Norms by layer of a step, in many layouts: a task for the ranks of a pool (see layouts.py)."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from layout_faults import FAULTS
from live_state import gathered
from piped import place

from headrace.trainer.engines import update as steps_of
from headrace.trainer.engines.layer_norms import layer_of, layers_of, norms

LAUNCH = steps_of.launch


def watched(
    folder: Path, layouts: list[str], model: str, fault: str | None = None
) -> dict[str, tuple[Any, Any, Any]]:
    """Return, for each layout, the norms by layer of a second step; those of its weights and update
    from the whole state before and after it; and results and weights beside those of an engine
    without them (True: equal to the bit)."""
    work: Any = import_module("work")  # layouts.py, as the pool's ranks name it
    found = {}
    for layout in layouts:
        parallel = place(layout, model)
        with FAULTS[fault](parallel) if fault else nullcontext():
            plain = work.make_engine(layout, parallel, model=model)
            results = work.train(plain, parallel, 0, 2)
            engine = work.make_engine(layout, parallel, model=model)
            work.train(engine, parallel, 0, 1)
            layers, seen = layers_of(engine.objective.model.config), []

            def launch(*arguments: Any, layers: Any = layers, seen: Any = seen) -> torch.Tensor:
                seen.append(LAUNCH(*arguments, layers))
                return seen[-1]

            before = gathered(engine, parallel)
            with mock.patch.object(steps_of, "launch", launch):
                second = work.train(engine, parallel, 1, 1)
            after, other = gathered(engine, parallel), gathered(plain, parallel)
        same = second == results[1:] and all(torch.equal(after[k], other[k]) for k in other)
        own = {layer: tuple(each) for layer, each in norms(layers, seen[0][1:]).items()}
        found[layout] = (own, whole_norms(before, after), (same, second[0][1]))
    return found


def whole_norms(before: Any, after: Any) -> dict[str, tuple[float, float]]:
    squares: dict[str, Any] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for key, weight in before.items():
        kind, _, name = key.partition(".")
        if kind == "master":
            apart = (after[key] - weight).double().square().sum()
            squares[layer_of(name)] += torch.stack([weight.double().square().sum(), apart])
    return {layer: tuple(both.sqrt().tolist()) for layer, both in squares.items()}
