"""The gradient of a small part of a step: a task for the ranks of a pool (see layouts.py)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from support.tasks.live_state import gathered
from support.tasks.piped import config_of, place, run_passes

from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.trainer.engines.objective import Objective
from headrace.trainer.loop.signals import MaskedBatch, Signals


def small_batches(
    folder: Path, layouts: list[str], at_once: int | None, model: str = "tiny"
) -> dict[str, tuple[int, float, bool]]:
    """Return, for each layout, the rows of the small batch, the square of its gradient's norm, and
    whether the step after it is equal to the bit to one without it."""
    work: Any = import_module("work")  # layouts.py, as the pool's ranks name it
    result = {}
    for layout in layouts:
        parallel = place(layout, model)
        plain = work.make_engine(layout, parallel, model=model)
        expected = work.train(plain, parallel, 0, 2, at_once=at_once)
        engine = work.make_engine(layout, parallel, model=model)
        signals, seen = Signals(engine, parallel, None, 1), []

        def passes(
            engine: Any, parallel: Any, batches: Any, *rest: Any, signals: Any = signals
        ) -> Any:
            parts = [MaskedBatch(*batch, rows=range(len(batch.tokens))) for batch in batches]
            seen.append(signals.small_batch(SimpleNamespace(number=0), parts))  # noqa: B023
            return run_passes(engine, parallel, batches, *rest)

        with mock.patch.object(work, "run_passes", passes):
            results = work.train(engine, parallel, 0, 2, at_once=at_once)
        state, plain_state = gathered(engine, parallel), gathered(plain, parallel)
        equal = results == expected and all(
            torch.equal(state[key], plain_state[key]) for key in plain_state
        )
        result[layout] = (seen[0].rows, float(seen[0].square), equal)
    return result


def whole_square(model: str, rows: int) -> float:
    """Return the square of the norm of the gradient on the first rows of a step, by autograd on a
    whole model, row by row."""
    work: Any = import_module("work")
    whole = Model(config_of(model))
    whole.init_weights(3)
    objective = Objective(whole, work.Z_LOSS)
    batch = work.global_batch(0)
    divisor = batch[2][:rows].sum()
    for row in range(rows):
        tokens, targets, weights, starts = (part[row : row + 1] for part in batch)
        cuts = [0, *starts[0].nonzero().flatten().tolist(), tokens.shape[1]]
        documents = Documents.build(torch.tensor(cuts).unique(), tuple(tokens.shape))
        (objective(tokens, targets, weights, documents).total / divisor).backward()
    result = [parameter.grad for parameter in objective.parameters() if parameter.grad is not None]
    return sum(float(gradient.double().square().sum()) for gradient in result)
