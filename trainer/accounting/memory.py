"""Costs of a run, counted before it starts: parameters, batches, memory, checkpoints."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.accounting.stored import stored
from ..loop.batches import micro_batches, micro_rows
from ..run.job import Job

if TYPE_CHECKING:
    from ...models.accounting.level import EngineMemory
    from ...models.accounting.pieces import ModelPasses
    from ...models.accounting.shape import Shape
    from ...models.accounting.state import Degrees
    from ...models.accounting.step import Timeline
    from ...models.config.config import ModelConfig
    from ..engines.optimizers.config import OptimizerConfig
    from ..layout.config import LayoutConfig
    from ..layout.cuts import Cuts

TRAINER = Path(__file__).parents[1]
"""Modules whose source decides a stored answer, beside those of the models."""
NUMBER_BYTES = 4
"""Bytes of a number in a checkpoint: masters and optimizer states are fp32."""


def parameters(job: Job) -> dict[str, int]:
    """Return the number of parameters, and of those that a token uses."""

    def count() -> dict[str, int]:
        from ...models.accounting.count import active_parameters, build_meta, parameters

        model = build_meta(job.model)
        return {"parameters": parameters(model), "active_parameters": active_parameters(model)}

    return stored(f"counts {job.model!r}", count)


def checkpoint_bytes(job: Job) -> int:
    def count() -> int:
        from ...models.accounting.count import build_meta
        from ..engines.groups import kept_states, parameter_groups

        model, optimizer = build_meta(job.model), job.run.optimizer
        states = kept_states(parameter_groups(model, optimizer), averaged=optimizer.ema is not None)
        return sum(
            NUMBER_BYTES * (1 + len(states[name])) * parameter.numel()
            for name, parameter in model.named_parameters()
        )

    return stored(f"checkpoint {job.model!r} {_rateless(job)!r}", count, source=TRAINER)


def groups(job: Job) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, with their rates and decays."""

    def count() -> list[dict[str, Any]]:
        from ...models.accounting.count import build_meta
        from ..engines.groups import describe_groups

        model = build_meta(job.model)
        return describe_groups(model, _rateless(job), model.full_precision(job.precision))

    question = f"groups {job.model!r} {_rateless(job)!r} {job.precision!r}"
    groups = stored(question, count, source=TRAINER)
    return [group | {"lr": job.run.optimizer.lr * group["lr"]} for group in groups]


def _rateless(job: Job) -> OptimizerConfig:
    """Return the optimizer with a rate of one: runs with other rates have the same counts."""
    return replace(job.run.optimizer, lr=1.0)


def checkpoints(job: Job) -> int:
    """Count the checkpoints that the run saves."""
    first, last = job.plan.first_step, job.plan.last_step
    planned = {step for step in range(first + 1, last) if step % job.run.checkpoints.every == 0}
    return len(planned | set(job.ends))


def batches(job: Job) -> list[dict[str, Any]]:
    """Return each phase's rows, micro-batches and steps."""
    phases = []
    for phase in job.plan.phases:
        rows = micro_rows(job.run.micro_batch_tokens, phase, job.dp, job.run.layout.cp)
        phases.append(
            {
                "phase": phase.name,
                "tokens": phase.tokens,
                "steps": phase.steps,
                "seq_len": phase.seq_len,
                "rows": phase.batch_rows,
                "micro_batches": micro_batches(rows, phase, job.dp),
                "micro_batch_rows": rows,
            }
        )
    return phases


def state_memory(job: Job, stage: int) -> list[dict[str, int]]:
    """Return the bytes of the state on a rank of a stage, by part, for each tensor rank."""
    from ...models.accounting.count import build_meta
    from ...models.accounting.memory import rank_shards
    from ...models.accounting.state import state_bytes
    from ..layout.stages import chunks_of
    from .parameters import engine_state

    degrees, device = _degrees(job), job.run.device
    assert device != "auto"
    own = chunks_of(job.run.layout, stage)
    model = build_meta(job.model)
    model.keep(job.cuts, own)
    state = engine_state(job.run, model, job.precision, device)
    shards = [rank_shards(job.model, degrees, n, job.cuts, own) for n in range(degrees.tp)]
    return [state_bytes(state.parts, each, degrees) for each in shards]


def scoring_memory(job: Job, *, activations: bool) -> dict[str, int]:
    """Return the bytes on a rank that scores a checkpoint, by part: the state of the run stays, and
    the rank loads whole weights beside it, on a GPU through fp32 on the host; `activations` adds
    those of the largest batch."""
    from ...models.accounting.count import build_meta
    from ...models.accounting.state import HOST, device_bytes
    from ...models.config.options.precision import default_precision

    device = job.run.device
    assert device != "auto"
    stages = range(job.run.layout.pp)
    state = max((parts for stage in stages for parts in state_memory(job, stage)), key=device_bytes)
    model = build_meta(job.model)
    number = sum(parameter.numel() for parameter in model.parameters())
    model.cast(default_precision(device))
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    parts = {"state": device_bytes(state), "whole weights": weights}
    parts |= {name: size for name, size in state.items() if name.startswith(HOST)}
    if device != "cpu":
        parts[f"{HOST}loading"] = NUMBER_BYTES * number
    return parts | (batch_memory(job.model, largest_batch(job)) if activations else {})


def generation_caches(job: Job) -> int:
    """Return the bytes of the states and caches of a batch of a task that generates."""
    from ...models.accounting.memory import generation_bytes

    shape = largest_batch(job)
    return shape.rows * generation_bytes(job.model, shape.seq_len, precision=shape.precision)


def largest_batch(job: Job) -> Shape:
    """Return the shape of a batch of the longest contexts; each rank has the model whole."""
    from ...models.accounting.shape import Shape
    from ...models.config.options.precision import default_precision

    config, device = job.run.scores, job.run.device
    assert config is not None and device != "auto"
    length = config.max_length or max(phase.seq_len for phase in job.plan.phases)
    length = min(length, job.model.learned_positions or length)
    return Shape(
        rows=max(1, config.batch_tokens // length),
        seq_len=length,
        precision=default_precision(device),
        device=device,
        threads=job.threads if device == "cpu" else 1,
    )


def batch_memory(config: ModelConfig, shape: Shape) -> dict[str, int]:
    """Return the bytes of a batch that is scored, by part, where they are the most: in a layer, or
    at the end, where all tokens are scored.

    The layers are those of a training step that recomputes all blocks: its forward pass keeps
    nothing of a block but the result. The end of the model runs on fake tensors.
    """
    from ...models.accounting.level import ACTIVATIONS, INPUTS, LOGITS
    from ...models.accounting.passes import model_passes
    from ...models.accounting.pieces import high
    from ...models.accounting.step import stream_bytes
    from ...models.config.options.recompute import rules_of

    passes = model_passes(config, shape, rules_of("block", len(config.layers)))
    stream = stream_bytes(shape, config.width)
    embeddings = stream if any(layer.shared for layer in config.layers) else 0
    layers = embeddings + stream + max(high(each.forward) for each in passes.layers)
    kept, end = _end(config, shape)
    inputs = {INPUTS: 3 * 8 * shape.rows * shape.seq_len}  # ids, places and targets
    if layers > kept + end:
        return {ACTIVATIONS: layers, **inputs}
    return {ACTIVATIONS: kept, LOGITS: end, **inputs}


def _end(config: ModelConfig, shape: Shape) -> tuple[int, int]:
    """Return the bytes of the results for all tokens, and of the logits of a chunk of them."""
    import torch

    from ...models.accounting.fake.model import FakeModel
    from ...models.accounting.sorts import one_of_each
    from ...models.model.model import Model
    from ..scores.likelihood import POSITIONS, score_part

    tokens = shape.rows * shape.seq_len

    def norm(model: Model) -> None:
        hidden = model.norm(torch.empty(1, tokens, config.width))
        hidden[0][torch.arange(tokens)]

    def logits(model: Model) -> None:
        part = min(POSITIONS, tokens)
        score_part(model, torch.empty(part, config.width), torch.zeros(part, dtype=torch.int64))

    model = FakeModel(one_of_each(config), replace(shape, rows=1, seq_len=1))
    return model.most(norm), model.most(logits)


def timelines(job: Job, stage: int) -> list[Timeline]:
    """Return the memory over a step of each tensor rank of a stage, in the phase with the most."""
    from ...models.accounting.count import build_meta
    from ...models.accounting.memory import rank_shards
    from ...models.accounting.passes import model_passes
    from ...models.accounting.shape import Shape
    from ...models.accounting.step import input_bytes, stream_bytes
    from ..layout.stages import chunks_of
    from .parameters import engine_state

    layout, degrees, device = job.run.layout, _degrees(job), job.run.device
    assert device != "auto"
    own = chunks_of(layout, stage)
    model = build_meta(job.model)
    model.keep(job.cuts, own)
    state = engine_state(job.run, model, job.precision, device)
    shards = [rank_shards(job.model, degrees, n, job.cuts, own) for n in range(degrees.tp)]
    most: list[Timeline] = []
    for phase in job.plan.phases:
        rows = micro_rows(job.run.micro_batch_tokens, phase, job.dp, degrees.cp)
        shape = Shape(
            rows=rows,
            seq_len=phase.seq_len,
            precision=job.precision,
            device=device,
            degrees=degrees,
            attention=layout.attention,
            hyena_li=layout.hyena_li,
            linear=state.linear,
            threads=job.threads if device == "cpu" else 1,
        )
        passes = model_passes(job.model, shape, job.rules)
        number, inputs = micro_batches(rows, phase, job.dp), input_bytes(shape)
        stream = stream_bytes(shape, job.model.width)
        found = [
            step_memory(
                passes, state.memory(each, degrees), layout, job.cuts, stage, number, inputs, stream
            )
            for each in shards
        ]
        if not most or found[0].highest > most[0].highest:
            most = found
    return most


def step_memory(
    passes: ModelPasses,
    engine: EngineMemory,
    layout: LayoutConfig,
    cuts: Cuts,
    stage: int,
    micro_batches: int,
    inputs: int,
    stream: int,
    *,
    every: bool = False,
) -> Timeline:
    """Return the memory over a step of a rank of a stage. The dry run, the message of a rank that
    runs out of memory, and the planner count by it. `inputs` are the bytes of a micro-batch, and
    `stream` those of a tensor that it passes to another stage.

    Of micro-batches that are alike, as many are in it as the highest level needs, or `every` one.
    """
    from ...models.accounting.step import Action, timeline
    from ...models.config.config import chunk_layers
    from ..layout.messages import messages

    number = micro_batches if every else different(layout, micro_batches)
    actions = [
        Action(
            kind=own.kind,
            chunk=own.chunk,
            micro=own.micro,
            received=[each.chunk for each in found.received],
            arrived=[each.chunk for each in found.arrived if each.kind == "backward"],
        )
        for own, found in messages(layout.orders(number), stage).items()
    ]
    chunks = chunk_layers(len(passes.layers), cuts)
    return timeline(passes, engine, actions, chunks, inputs, stream)


def different(layout: LayoutConfig, micro_batches: int) -> int:
    """Return a number of micro-batches with the same highest level: a schedule runs ahead by a
    fixed number of them, and then repeats itself. GPipe runs ahead by all of them."""
    if layout.schedule == "gpipe" and layout.pp > 1:
        return micro_batches
    if layout.chunks > 1:
        return min(micro_batches, 4 * layout.pp + micro_batches % layout.pp)
    return min(micro_batches, layout.pp + 2)


def ahead(layout: LayoutConfig) -> int:
    """Return the most micro-batches that are alive before the first backward pass ends."""
    if layout.schedule == "gpipe" and layout.pp > 1:
        return sys.maxsize
    return layout.pp * (1 if layout.chunks == 1 else 2)


def _degrees(job: Job) -> Degrees:
    from ...models.accounting.state import Degrees

    layout = job.run.layout
    return Degrees(dp=job.dp, tp=layout.tp, cp=layout.cp, ep=layout.ep)
