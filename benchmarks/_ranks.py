"""Processes of a benchmark that form one process group."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from headrace.models.accounting.count import build_meta
from headrace.models.config.config import ModelConfig
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.model.model import initial_weights
from headrace.trainer.engines.config import EngineConfig
from headrace.trainer.engines.engine import Engine, load_weights
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import Parallel, create_groups
from headrace.trainer.layout.stages import choose_cuts, list_chunks, shared_modules

TIMEOUT = timedelta(minutes=5)


def run(ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work(*arguments)` on so many ranks with one thread each. Return rank 0's result."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        options = (ranks, f"{folder}/store", results, work, arguments)
        multiprocessing.spawn(_serve, args=options, nprocs=ranks)
        return results.get()


def _serve(
    rank: int, ranks: int, store: str, results: Any, work: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    result = work(*arguments)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()


def build(
    config: ModelConfig, engine: EngineConfig, layout: LayoutConfig, seq_len: int, precision: str
) -> tuple[Engine, Parallel]:
    """Return an engine with initial weights in a layout. Collective."""
    cuts = choose_cuts(layout, config, seq_len)
    parallel = create_groups(layout, "cpu", TIMEOUT, shared_modules(layout, config, cuts))
    model = build_meta(config)
    model.keep(cuts, list_chunks(layout, parallel.pipe.stage))
    model.shard(parallel.axes)
    built = engine.build(Objective(model), AdamWConfig(), PRECISIONS[precision], parallel)
    load_weights(built, initial_weights(config, 0))
    return built, parallel
