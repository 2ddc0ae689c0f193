"""Tasks for the ranks of a pool (support/ranks/ranks.py): train, save and load in many layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.configs import DEEPSPEEDS_OWN
from support.tasks.changed_deepspeed import answers
from support.tasks.layout_faults import FAULTS
from support.tasks.live_state import fp32_in_use, gathered, live_weights, oracle
from support.tasks.piped import (
    LENGTH,
    Batch,
    config_of,
    keep,
    place,
    run_passes,
)
from torch import nn
from torch._dynamo.utils import counters

from benchmarks._collectives import Count
from benchmarks._memory import measured as measured_memory  # noqa: F401 (a task)
from headrace.models.accounting.count import build_meta
from headrace.models.config.options.precision import PRECISIONS, Fp8Config
from headrace.models.config.options.recompute import Recompute
from headrace.models.model.model import initial_weights
from headrace.models.parallel.sharding import slice_local_shard
from headrace.models.transforms.fp8 import quantize
from headrace.trainer.checkpoints import saver, store
from headrace.trainer.checkpoints.policy import CheckpointConfig
from headrace.trainer.engines import deepspeed as deepspeed_engine
from headrace.trainer.engines import update as steps_of
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.engine import Engine, load_weights
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers import OPTIMIZERS
from headrace.trainer.engines.shard_groups import LayerShards
from headrace.trainer.engines.update import conclude, launch, update
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.layout.schedules import forward_only
from headrace.trainer.loop.execute import execute

LR = 1e-2
Z_LOSS = 1e-3
ROWS = 8
"""Rows of a global batch: two on each of 4 ranks."""
BUCKET = 1024
"""Elements of a DeepSpeed bucket: gradients fill several, and some exceed one."""
deepspeed_engine.LARGEST_BUCKET["cpu"] = BUCKET
LINEAR = nn.functional.linear
"""torch's own. ZeRO-3 replaces it, for every engine that is built after it."""

KEYS = {
    "offload": {"offload_optimizer": "cpu"},
    "overlap": {"overlap_comm": True},
    "reduced16": {"communication_data_type": "bf16"},
    "hpz": {
        "zero_hpz_partition_size": 2,
        "extra": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    },
    "away": {"offload": "cpu"},
    "ahead": {"keep_last": 1, "forward_prefetch": 2, "backward_prefetch": 2},
    "kept": {
        "layers": (
            LayerShards(layers=(0, 1), reshard=False),
            LayerShards(layers=(3, 3), reshard=False),
        )
    },
    "own": {
        "layers": (
            LayerShards(layers=(0, 0), shard=1),
            LayerShards(layers=(2, 3), shard=2, reshard=False),
        )
    },
}
"""Keys of an engine, by a word of a layout."""
GATHER = {"block": "block", "micro": "micro-batch", "step": "step"}
"""Settings of FSDP2, by the last word of a layout."""

norm_of = steps_of.squared_norm


def engine_config(layout: str) -> Any:
    """Return the configuration of an engine. Words at the end of a layout change it."""
    kind, option, *words = layout.split("-")
    keys: dict[str, Any] = {}
    for word in words:
        keys |= next(
            (keys_of_word for name, keys_of_word in KEYS.items() if word.startswith(name)), {}
        )
    if kind == "deepspeed":
        keys.setdefault("extra", DEEPSPEEDS_OWN)
        return DeepSpeedConfig(zero=int(option), **keys)  # type: ignore[arg-type]
    gather = next((gather for word, gather in GATHER.items() if layout.endswith(word)), None)
    return Fsdp2Config(shard=int(option) or None, gather=gather, **keys)  # type: ignore[arg-type]


def make_engine(
    layout: str,
    parallel: Parallel,
    seed: int = 3,
    model: str = "tiny",
    changes: Sequence[str] = (),
    optimizer: str = "adamw",
    recompute: Recompute = "none",
    backend: str | None = None,
    **options: Any,
) -> Engine:
    """Build the engine of `deepspeed-1-bf16`, `fsdp2-0-fp32`, `deepspeed-3-fp32-tp2`, …; `backend`
    compiles its blocks."""
    nn.functional.linear = LINEAR
    precision = layout.split("-")[2]
    config = engine_config(layout)
    if backend is not None:
        config = replace(config, compile=True, compile_backend=backend)
    settings: Any = OPTIMIZERS[optimizer](**{"lr": LR, "clip": 0.5, **options})  # type: ignore[arg-type]
    shape = config_of(model, changes)
    chosen = PRECISIONS[precision.removesuffix("fp8") or "fp8"]
    if precision.endswith("fp8"):  # `fp32fp8`: products in FP8, and all else in fp32
        chosen = replace(chosen, fp8=Fp8Config(smallest=16, ends=0))
    empty = quantize(build_meta(shape), chosen.fp8)
    keep(empty, parallel)
    empty.set_recompute(recompute)
    engine = config.build(Objective(empty, Z_LOSS), settings, chosen, parallel)
    load_weights(engine, initial_weights(shape, seed))
    if "hpz" in layout:  # DeepSpeed has one such group for a process: the next engine has none
        vars(import_module("deepspeed.utils.groups"))["_ZERO_PARAM_INTRA_PARALLEL_GROUP"] = None
    return engine


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, targets, weights and document starts: uneven weights, packed documents."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 37, (ROWS, LENGTH + 1), generator=generator)
    weights = (torch.rand(ROWS, LENGTH, generator=generator) > 0.3).float()
    weights[step % ROWS] = 0.25
    weights[(step + 2) % ROWS] *= 0.1  # 0.1 is not a bf16 number
    weights[(step + 1) % ROWS] = 0.0
    starts = torch.rand(ROWS, LENGTH, generator=generator) < 0.1
    return tokens[:, :-1], tokens[:, 1:], weights, starts


def train(
    engine: Engine,
    parallel: Parallel,
    first: int,
    steps: int,
    *,
    mean_of_means: bool = False,
    scale: float = 1.0,
    at_once: int | None = None,
) -> list[list[float]]:
    """Return [loss, gradient norm] of each step. The ranks take the rows of a batch in turn.

    `at_once` is the number of rows in a micro-batch; by default a rank has two micro-batches, or
    two for each stage of a pipeline.
    `mean_of_means` is a fault that tests must find: a rank divides by the sum of its own weights.
    `scale` multiplies all weights, which must not change the loss.
    """
    results = []
    for step in range(first, first + steps):
        tokens, targets, weights, starts = global_batch(step)
        weights = weights * scale
        total = float(weights.sum())
        mine = torch.arange(ROWS)[parallel.dp_rank :: parallel.dp]
        mine = mine.view(-1, at_once or max(1, len(mine) // 2 // parallel.pipe.layout.pp))
        divisor = float(weights[mine].sum()) * parallel.dp if mean_of_means else total
        ours = parallel.axes.context.part(LENGTH)
        batches = []
        for rows in mine:
            cuts = starts[rows].flatten().nonzero().flatten()
            ends = torch.tensor([0, LENGTH * len(rows)])
            part = (tensor[rows][:, ours] for tensor in (tokens, targets, weights))
            batches.append(Batch(*part, torch.cat([ends[:1], cuts, ends[1:]])))
        losses = run_passes(engine, parallel, batches, divisor)
        loss = torch.stack([loss.sum().double() for loss in losses]).sum()
        dist.all_reduce(loss, group=parallel.control)
        result = update(engine, LR)
        assert result.applied
        results.append([float(loss) / total, result.grad_norm])
    return results


def collectives(
    folder: Path, layouts: list[str], model: str = "tiny", **options: Any
) -> dict[str, dict[str, list[int]]]:
    """Return calls and bytes of the collectives that rank 0 makes in a second step, by kind."""
    result = {}
    for layout in layouts:
        parallel = place(layout, model)
        engine = make_engine(layout, parallel, model=model, **options)
        train(engine, parallel, 0, 1)
        with Count() as count:
            train(engine, parallel, 1, 1, at_once=1)
        result[layout] = {kind: [n, count.bytes[kind]] for kind, n in sorted(count.calls.items())}
    return result


def evaluate(engine: Engine, parallel: Parallel) -> None:
    """Run the forward passes of one micro-batch, as an evaluation does."""
    ours = parallel.axes.context.part(LENGTH)
    row = (part[:1, ours] for part in global_batch(0)[:3])
    batch: Any = Batch(*row, torch.tensor([0, LENGTH]))
    engine.objective.eval()
    with torch.no_grad():
        execute(forward_only(parallel.pipe.orders(1)), [batch], engine, parallel)
    engine.objective.train()


def fp32_after_a_step(folder: Path, layouts: list[str], model: str) -> dict[str, dict[str, bool]]:
    """Return what each engine uses of the parameters that must not be rounded, after a step."""
    result = {}
    for layout in layouts:
        parallel = place(layout, model)
        engine = make_engine(layout, parallel, model=model)
        train(engine, parallel, 0, 1)
        result[layout] = fp32_in_use(engine, parallel, partial(train, engine, parallel, 1, 1))
    return result


def state_at(step: int) -> store.RunState:
    place: Any = {"step": step, "row": step * ROWS, "tokens": step * ROWS * LENGTH}
    return store.RunState(**place, plan_hash="synthetic", updates=step, ledger="", seed=3)


def parity(
    folder: Path,
    layouts: list[str],
    steps: int,
    mean_of_means: bool = False,
    fault: str | None = None,
    model: str = "tiny",
    at_once: int | None = None,
    **engine_options: Any,
) -> dict[str, Any]:
    """Return losses and norms of each layout, and save its whole state. `fault` is one that tests
    must find (layout_faults.py)."""
    result: dict[str, Any] = {}
    for layout in layouts:
        parallel = place(layout, model)
        with FAULTS[fault](parallel) if fault else nullcontext():
            engine = make_engine(layout, parallel, model=model, **engine_options)
            result[layout] = train(
                engine, parallel, 0, steps, mean_of_means=mean_of_means, at_once=at_once
            )
            whole = gathered(engine, parallel)
        if parallel.first:
            torch.save(whole, folder / f"{layout}.pt")
    return result


def compiled(
    folder: Path, layouts: list[str], backend: str, **options: Any
) -> dict[str, tuple[Any, Any, int, list[str]]]:
    """Return losses and norms of two steps in each layout, run eagerly and compiled; the number of
    graphs, and the reasons of their breaks."""
    result = {}
    for layout in layouts:
        parallel = place(layout)
        torch.compiler.reset()
        counters.clear()
        both = [
            train(make_engine(layout, parallel, backend=how, **options), parallel, 0, 2)
            for how in (None, backend)
        ]
        stats, breaks = counters["stats"], counters["graph_break"]
        result[layout] = (*both, int(stats["unique_graphs"]), list(breaks))
    return result


def scaled(folder: Path, layouts: list[str], scales: list[float]) -> dict[str, Any]:
    """Return the first step's loss in each layout, for weights of each scale."""
    return {
        layout: [
            train(make_engine(layout, place(layout)), place(layout), 0, 1, scale=scale)[0][0]
            for scale in scales
        ]
        for layout in layouts
    }


def save_all(
    folder: Path, layouts: list[str], steps: int, model: str = "tiny", **options: Any
) -> dict[str, Any]:
    """Train and save in each layout; return two more steps, which a resume must repeat."""
    result: dict[str, Any] = {}
    for layout in layouts:
        parallel = place(layout, model)
        engine = make_engine(layout, parallel, model=model, **options)
        train(engine, parallel, 0, steps)
        keeper = saver.Saver(folder / layout, CheckpointConfig(), parallel.checkpoint)
        (folder / layout).mkdir(exist_ok=True)
        keeper.save(engine.fragments(), state_at(steps))
        whole = oracle(engine, parallel)
        next_steps = train(engine, parallel, steps, 2)  # during the background write
        keeper.wait()
        if parallel.first:
            torch.save(whole, folder / f"{layout}.pt")
        result[layout] = next_steps
    return result


def load_all(
    folder: Path,
    sources: list[str],
    targets: list[str],
    steps: int,
    used: bool,
    model: str = "tiny",
    **options: Any,
) -> dict[str, Any]:
    """Load every source into every target, which has other weights or was trained before, and has
    just evaluated them."""
    result: dict[str, Any] = {}
    for target in targets:
        parallel = place(target, model)
        engine = make_engine(target, parallel, seed=99, model=model, **options)
        if used:
            train(engine, parallel, 50, 1)
        for source in sources:
            path = folder / source / store.name(steps)
            evaluate(engine, parallel)
            state = saver.load(path, engine.fragments(), parallel.checkpoint)
            engine.loaded(state.updates)
            expected, have = torch.load(folder / f"{source}.pt"), oracle(engine, parallel)
            assert have.keys() == expected.keys()
            worst = max(float((have[k].cpu() - expected[k]).abs().max()) for k in expected)
            for name, weight in live_weights(engine).items():
                part = engine.objective.model.local_shards[name]
                master = slice_local_shard(part, have[f"master.{name}"]).to(weight.dtype)
                assert torch.equal(weight, master), f"{source} → {target}: {name} is stale"
            # One step changes the state before the next source is loaded; a resume takes two.
            further = train(engine, parallel, steps, 2 if source == target else 1)
            result[f"{source} → {target}"] = [worst, further]
    return result


def left_out(
    folder: Path, layouts: list[str], faulty: int | None = None, model: str = "tiny"
) -> dict[str, list[bool]]:
    """Give each engine a step with a NaN and one that is discarded, by all ranks or by one
    data-parallel rank. Return whether one was applied, whether weights and moments stay, the number
    of steps grows by one, and the next step is the same."""
    result = {}
    for layout in layouts:
        parallel = place(layout, model)
        never = train(make_engine(layout, parallel, model=model), parallel, 0, 2)
        engine = make_engine(layout, parallel, model=model)
        train(engine, parallel, 0, 1)
        before, updates = gathered(engine, parallel), engine.updates
        batch = Batch(*(part[1:2] for part in global_batch(7)[:3]), torch.tensor([0, LENGTH]))
        broken = faulty is None or parallel.data.rank == faulty
        applied = False
        for divides, discards in ((broken, False), (False, broken)):
            run_passes(engine, parallel, [batch, batch], math.nan if divides else 1.0)
            applied |= conclude(engine, float(launch(engine, LR, discard=discards)[0])).applied
        after = gathered(engine, parallel)
        unchanged = all(torch.equal(before[key], after[key]) for key in before)
        continues = train(engine, parallel, 1, 1) == never[1:]
        result[layout] = [applied, unchanged, engine.updates == updates + 1, continues]
    return result


def changed_deepspeed(folder: Path, layouts: list[str], model: str) -> dict[str, dict[str, str]]:
    """Return the answer of an engine of each layout to each change of DeepSpeed."""
    return {
        layout: answers(partial(make_engine, layout, place(layout, model), model=model))
        for layout in layouts
    }
