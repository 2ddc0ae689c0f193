"""Norms by layer of a step, in many layouts: a task for the ranks of a pool (see layouts.py)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.tasks.layout_faults import FAULTS
from support.tasks.live_state import gathered
from support.tasks.piped import config_of, place

from headrace.models.accounting.count import build_meta
from headrace.models.accounting.level import Level
from headrace.models.accounting.state import Degrees
from headrace.models.config.config import ModelConfig
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.documents import Documents
from headrace.models.model.block import Block
from headrace.models.model.layer_watch import LayerWatch
from headrace.models.model.model import Model
from headrace.models.operators.moe import MoE
from headrace.trainer.accounting.parameters import parameter_state
from headrace.trainer.accounting.state import add_full_precision
from headrace.trainer.accounting.watched import add_watched_masters
from headrace.trainer.checkpoints.fragments import masters
from headrace.trainer.engines import update as steps_of
from headrace.trainer.engines.layer_norms import (
    LayerSquares,
    layer_name,
    layer_names,
    norms_by_layer,
)
from headrace.trainer.run.config import RunConfig

LAUNCH = steps_of.launch


def norms_of(
    folder: Path, layouts: list[str], model: str, fault: str | None = None
) -> dict[str, tuple[Any, Any, Any]]:
    """Return, for each layout, the norms by layer of a second step; those of its weights and update
    from the whole state before and after it; and results and weights beside those of an engine
    without them (True: equal to the bit)."""
    work: Any = import_module("work")  # layouts.py, as the pool's ranks name it
    result = {}
    for layout in layouts:
        parallel = place(layout, model)
        with FAULTS[fault](parallel) if fault else nullcontext():
            plain = work.make_engine(layout, parallel, model=model)
            results = work.train(plain, parallel, 0, 2)
            engine = work.make_engine(layout, parallel, model=model)
            work.train(engine, parallel, 0, 1)
            layers, seen = layer_names(engine.objective.model.config), []

            def launch(*arguments: Any, layers: Any = layers, seen: Any = seen) -> torch.Tensor:
                seen.append(LAUNCH(*arguments, layers))
                return seen[-1]

            before = gathered(engine, parallel)
            with mock.patch.object(steps_of, "launch", launch):
                second = work.train(engine, parallel, 1, 1)
            after, plain_state = gathered(engine, parallel), gathered(plain, parallel)
        is_equal = second == results[1:] and all(
            torch.equal(after[k], plain_state[k]) for k in plain_state
        )
        norms = {layer: tuple(pair) for layer, pair in norms_by_layer(layers, seen[0][1:]).items()}
        result[layout] = (norms, whole_norms(before, after), (is_equal, second[0][1]))
    return result


def whole_norms(before: Any, after: Any) -> dict[str, tuple[float, float]]:
    squares: dict[str, Any] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for key, weight in before.items():
        kind, _, name = key.partition(".")
        if kind == "master":
            apart = (after[key] - weight).double().square().sum()
            squares[layer_name(name)] += torch.stack([weight.double().square().sum(), apart])
    return {layer: tuple(both.sqrt().tolist()) for layer, both in squares.items()}


def forward_signals(
    folder: Path, layouts: list[str], model: str = "tiny", recompute: Any = "none"
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the signals of a step's forward passes by layer, in each layout."""
    work: Any = import_module("work")  # layouts.py, as the pool's ranks name it
    result = {}
    for layout in layouts:
        parallel = place(layout, model)
        engine = work.make_engine(layout, parallel, model=model, recompute=recompute)
        watch = engine.objective.model.watch = LayerWatch(
            engine.objective.model.config, torch.device("cpu")
        )
        work.train(engine, parallel, 0, 1)
        dist.all_reduce(watch.sums)
        result[layout] = {
            layer: moments.entry() for layer, moments in watch.outputs(watch.sums).items()
        }
    return result


def whole_forward(config: ModelConfig, seed: int = 3) -> dict[str, dict[str, float]]:
    """Return the same of a whole model without an engine: from its blocks' outputs, and from the
    scores of its routers, without those that Sinkhorn's iteration balances or that have groups."""
    work: Any = import_module("work")
    model = Model(config)
    model.init_weights(seed)
    outputs: dict[str, list[torch.Tensor]] = defaultdict(list)
    scores: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda _, __, out, name=name: outputs[name].append(out[0]))
        elif isinstance(module, MoE) and not module.options.sinkhorn and module.options.groups == 1:
            module.router.register_forward_hook(
                lambda _, __, out, name=name: scores[name].append(out)
            )
    tokens, _, weights, starts = work.global_batch(0)
    for row in (weights != 0).any(dim=1).nonzero().flatten().tolist():
        ends = torch.tensor([0, *starts[row].nonzero().flatten().tolist(), tokens.shape[1]])
        cuts = torch.unique(ends)
        sequence = tokens[row : row + 1]
        model(sequence, Documents.build(cuts, tuple(sequence.shape)))
    result: dict[str, dict[str, float]] = {
        name: {
            "activation_rms": float(
                torch.cat(layer_outputs).detach().double().square().mean().sqrt()
            )
        }
        for name, layer_outputs in outputs.items()
    }
    for name, layer_scores in scores.items():
        options: Any = model.get_submodule(name).options
        chosen = torch.cat(layer_scores).topk(options.top_k, dim=-1).indices.flatten().tolist()
        shares = [count / len(chosen) for count in Counter(chosen).values()]
        entropy = -sum(share * math.log(share) for share in shares) / math.log(options.experts)
        layer = ".".join(name.split(".")[:2])
        result[layer] |= {"expert_max": max(shares) * options.experts, "expert_entropy": entropy}
    return result


def copied_masters(folder: Path, layouts: list[str]) -> dict[str, tuple[int, int]]:
    """Return, for each layout, the bytes that a watched step copies on the rank with the most, and
    those that the memory accounting counts."""
    work: Any = import_module("work")
    result = {}
    for layout in layouts:
        parallel = place(layout)
        engine = work.make_engine(layout, parallel)
        names = layer_names(engine.objective.model.config)
        gradients = masters(engine.fragments())  # of the same parameters
        squares = LayerSquares(engine, names, gradients)
        copied = [torch.tensor(sum(item.nbytes for item in squares.weights_before))] * 2
        dist.all_reduce(copied[0], op=dist.ReduceOp.MAX)
        config = work.engine_config(layout).for_ranks(parallel.data.size)
        precision = PRECISIONS[layout.split("-")[2]]
        parts = config.state_layout(precision, 8, "cpu", parallel.pipe.layout)
        run = replace(RunConfig(), engine=config)
        parameters = parameter_state(run, build_meta(config_of("tiny")), precision)
        parts = add_full_precision(parts, parameters)
        axes = parallel.axes
        degrees = Degrees(dp=parallel.dp, tp=axes.tensor.size, cp=axes.context.size)
        level, plain = Level(), mock.MagicMock()
        events = add_watched_masters(lambda *_, plain=plain: plain, parts)(
            engine.fragment_builder.shards, degrees
        )
        plain.update.side_effect = lambda level: level.end_moment("update", None, 0)
        events.update(level)
        assert level.total == 0, "the copy is free after the step"
        result[layout] = (int(copied[0]), sum(level.moments[0].high.values()))
    return result
