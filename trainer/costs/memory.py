"""Costs of a run, counted before it starts: parameters, batches, memory, checkpoints."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..loop.batches import micro_batches, micro_rows
from ..run.job import Job

if TYPE_CHECKING:
    from ...models.accounting.level import EngineMemory
    from ...models.accounting.pieces import ModelPasses
    from ...models.accounting.state import Degrees
    from ...models.accounting.step import Timeline
    from ..layout.config import LayoutConfig
    from ..pipeline.cuts import Cuts

NUMBER_BYTES = 4
"""Bytes of a number in a checkpoint: masters and optimizer states are fp32."""


def parameters(job: Job) -> dict[str, int]:
    """Return the number of parameters, and of those that a token uses."""
    from ...models.accounting.count import active_parameters, build_meta
    from ...models.accounting.count import parameters as count

    model = build_meta(job.model)
    return {"parameters": count(model), "active_parameters": active_parameters(model)}


def checkpoint_bytes(job: Job) -> int:
    from ...models.accounting.count import build_meta

    model = build_meta(job.model)
    states = job.run.optimizer.kept(model)
    return sum(
        NUMBER_BYTES * (1 + len(states[name])) * parameter.numel()
        for name, parameter in model.named_parameters()
    )


def groups(job: Job) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, with their rates and decays."""
    from ...models.accounting.count import build_meta
    from ..engines.groups import describe_groups

    model = build_meta(job.model)
    return describe_groups(model, job.run.optimizer, model.full_precision(job.precision))


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


def scoring_memory(job: Job) -> dict[str, int]:
    """Return the bytes on a rank that scores a checkpoint, by part, beside activations: the state
    of the run stays, and the rank loads whole weights, in fp32 before they move to a GPU."""
    from ...models.accounting.count import build_meta
    from ...models.accounting.state import HOST, device_bytes
    from ...models.options.precision import default_precision

    device = job.run.device
    assert device != "auto"
    stages = range(job.run.layout.pp)
    state = max(device_bytes(parts) for stage in stages for parts in state_memory(job, stage))
    model, precision = build_meta(job.model), default_precision(device)
    number = sum(parameter.numel() for parameter in model.parameters())
    model.cast(precision)
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    parts = {"state": state, "whole weights": weights}
    return parts if device == "cpu" else {**parts, f"{HOST}loading": NUMBER_BYTES * number}


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
    from ...models.config import chunk_layers
    from ..pipeline.messages import messages

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
