"""Moving averages of the weights in many layouts: a task for the ranks of a pool (layouts.py)."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from support.tasks.live_state import gathered
from support.tasks.piped import LENGTH, Batch, place, run_passes

from headrace.trainer.checkpoints import saver, store
from headrace.trainer.checkpoints.policy import CheckpointConfig
from headrace.trainer.engines.update import update

DECAY = 0.22
STEPS = 3


def decay(step: int) -> float:
    """Return the part of the average that the optimizer step `step`, from 1, keeps."""
    return min(DECAY, (1 + step) / (10 + step))


def weights(state: dict[str, torch.Tensor], kind: str = "master") -> dict[str, torch.Tensor]:
    return {
        key.partition(".")[2]: tensor
        for key, tensor in state.items()
        if key.partition(".")[0] == kind
    }


def averages(
    folder: Path, layouts: list[str], model: str = "tiny", **options: Any
) -> dict[str, dict[str, Any]]:
    """Train each layout with a moving average, and load its checkpoints into all layouts before it.
    Return what tests expect to be true, and the distance to an average of whole tensors."""
    work: Any = import_module("work")  # layouts.py, as the pool's ranks name it
    result: dict[str, dict[str, Any]] = {}
    saved: dict[str, dict[str, torch.Tensor]] = {}
    for layout in layouts:
        parallel = place(layout, model)
        plain = work.make_engine(layout, parallel, model=model, **options)
        expected = work.train(plain, parallel, 0, STEPS)
        engine = work.make_engine(layout, parallel, model=model, ema=DECAY, **options)
        expected_averages = weights(gathered(engine, parallel))
        results = []
        for step in range(STEPS):
            results += work.train(engine, parallel, step, 1)
            new = weights(gathered(engine, parallel))
            kept = decay(step + 1)
            expected_averages = {
                name: kept * expected_averages[name] + (1 - kept) * new[name]
                for name in expected_averages
            }
        before = gathered(engine, parallel)
        engine_averages = weights(before, "ema")
        plain_state = gathered(plain, parallel)
        _skip(engine, parallel, work)
        skipped = gathered(engine, parallel)
        keeper = saver.Saver(folder / layout, CheckpointConfig(), parallel.checkpoint)
        (folder / layout).mkdir(exist_ok=True)
        keeper.save(engine.fragments(), work.state_at(STEPS))
        keeper.save(plain.fragments(), work.state_at(STEPS + 1))
        keeper.wait()
        saved[layout] = before
        for source in saved:
            place_of = folder / source / store.name(STEPS)
            saver.load(place_of, engine.fragments(), parallel.checkpoint)
            result.setdefault(layout, {})[source] = _equal(
                gathered(engine, parallel), saved[source]
            )
        without = folder / layout / store.name(STEPS + 1)
        saver.load(without, engine.fragments(), parallel.checkpoint)
        begun = gathered(engine, parallel)
        result[layout] |= {
            "averages": sorted(engine_averages) == sorted(expected_averages)
            and bool(engine_averages or not parallel.first),
            "the step is as without one": results == expected
            and all(torch.equal(before[key], plain_state[key]) for key in plain_state),
            "a skipped step leaves it": _equal(skipped, before),
            "begins at the weights": _equal(weights(begun), weights(begun, "ema")),
            "moved": not _equal(weights(before), engine_averages) or not parallel.first,
        }
        apart = [
            float((engine_averages[name] - expected_averages[name]).abs().max())
            for name in expected_averages
        ]
        result[layout]["distance"] = max(apart, default=0.0)
    return result


def _skip(engine: Any, parallel: Any, work: Any) -> None:
    """Take a step whose gradients are not finite."""
    ours = parallel.axes.context.part(LENGTH)
    rows = (part[1:2, ours] for part in work.global_batch(7)[:3])
    batch = Batch(*rows, torch.tensor([0, LENGTH]))
    run_passes(engine, parallel, [batch, batch], math.nan)
    assert not update(engine, work.LR).applied


def _equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[key], second[key]) for key in first
    )
