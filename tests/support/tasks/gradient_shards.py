"""The whole gradient of a step, from the shards of all ranks: a task for the ranks of a pool."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.tasks.live_state import numbered
from support.tasks.piped import place

from headrace.trainer.engines import update as steps_of

NORM_OF = steps_of.squared_norm


def shards_of_gradients(folder: Path, layouts: list[str], model: str) -> dict[str, float]:
    """Save the whole gradient of a step for each layout, from the shards of all ranks that write.
    Return the norm that the optimizer step computes."""
    work: Any = import_module("work")  # layouts.py, as the pool's ranks name it
    result = {}
    for layout in layouts:
        engine = work.make_engine(layout, parallel := place(layout, model), model=model)
        seen: list[Any] = []

        def keep(gradients: Any, device: Any, seen: list[Any] = seen, **rest: Any) -> torch.Tensor:
            seen += [(g.parameter, g.shard, g.start, g.data.clone(), g.writes) for g in gradients]
            return NORM_OF(gradients, device)

        with mock.patch.object(steps_of, "squared_norm", keep):
            [[_, result[layout]]] = work.train(engine, parallel, 0, 1)
        everyone: list[Any] = [None] * parallel.world
        dist.all_gather_object(everyone, seen, group=parallel.control)
        whole: dict[str, torch.Tensor] = {}
        for name, shard, start, data, writes in (item for held in everyone for item in held):
            flat = whole.setdefault(name, torch.zeros(shard.shape)).view(-1)
            # A range that two ranks wrote would be counted twice.
            flat[numbered(shard)[start : start + data.numel()]] += data if writes else 0.0
        if parallel.first:
            torch.save(whole, folder / f"{layout}.gradients.pt")
    return result
