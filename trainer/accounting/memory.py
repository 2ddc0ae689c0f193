"""Count a run's parameters, batches, memory and checkpoints before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataplane.order.row_lengths import split_by_length
from ...models.accounting.stored import load_or_compute
from ..layout.schedules import SCHEDULES, Orders
from ..loop.batches import micro_batches, micro_rows
from ..run.job import Job

if TYPE_CHECKING:
    from ...models.accounting.level import EngineMemory, EngineState
    from ...models.accounting.pieces import ModelPasses
    from ...models.accounting.shape import Shape
    from ...models.accounting.state import Degrees, Shards
    from ...models.accounting.step import Action, Timeline
    from ...models.config.config import ModelConfig
    from ..engines.optimizers.config import OptimizerConfig
    from ..layout.config import LayoutConfig
    from ..layout.cuts import Cuts

TRAINER = Path(__file__).parents[1]
"""Folder whose source code decides stored counts, beside the models' code."""
NUMBER_BYTES = 4
"""Bytes per number in a checkpoint: masters and optimizer states are fp32."""


def parameters(job: Job) -> dict[str, int]:
    """Count the parameters, and those that a token uses."""

    def count() -> dict[str, int]:
        from ...models.accounting.count import build_meta, count_active_parameters, count_parameters

        model = build_meta(job.model)
        return {
            "parameters": count_parameters(model),
            "active_parameters": count_active_parameters(model),
        }

    return load_or_compute(f"counts {job.model!r}", count)


def checkpoint_bytes(job: Job) -> int:
    def count() -> int:
        from ...models.accounting.count import build_meta
        from ..engines.groups import parameter_groups, state_names

        model, optimizer = build_meta(job.model), job.run.optimizer
        states = state_names(parameter_groups(model, optimizer), averaged=optimizer.ema is not None)
        return sum(
            NUMBER_BYTES * (1 + len(states[parameter_name])) * parameter.numel()
            for parameter_name, parameter in model.named_parameters()
        )

    return load_or_compute(f"checkpoint {job.model!r} {_rateless(job)!r}", count, source=TRAINER)


def groups(job: Job) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, with their rates and decays."""

    def count() -> list[dict[str, Any]]:
        from ...models.accounting.count import build_meta
        from ..engines.groups import describe_groups

        model = build_meta(job.model)
        return describe_groups(model, _rateless(job), model.full_precision(job.precision))

    question = f"groups {job.model!r} {_rateless(job)!r} {job.precision!r}"
    groups = load_or_compute(question, count, source=TRAINER)
    return [group | {"lr": job.run.optimizer.lr * group["lr"]} for group in groups]


def _rateless(job: Job) -> OptimizerConfig:
    """Return the optimizer with a learning rate of 1: no count depends on the rate."""
    return replace(job.run.optimizer, lr=1.0)


def checkpoints(job: Job) -> int:
    """Count the checkpoints that the run saves."""
    steps, every = range(job.plan.first_step + 1, job.plan.end_step), job.run.checkpoints.every
    planned = {step for step in steps if step % every == 0}
    return len(planned | set(job.ends))


def batches(job: Job) -> list[dict[str, Any]]:
    """Return rows, micro-batches and steps by phase."""
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
    """Return the state's bytes by part, for every tensor rank in a stage."""
    from ...models.accounting.state import state_bytes

    state, shards_by_rank = _stage_state(job, stage)
    return [state_bytes(state.state_parts, shards, _degrees(job)) for shards in shards_by_rank]


def _stage_state(job: Job, stage: int) -> tuple[EngineState, list[Shards]]:
    """Return a stage's state, and the local shards by tensor rank."""
    from ...models.accounting.count import build_meta
    from ...models.accounting.memory import rank_shards
    from ..layout.stages import list_chunks
    from .parameters import engine_state

    degrees, device = _degrees(job), job.run.device
    assert device != "auto"
    chunks = list_chunks(job.run.layout, stage)
    model = build_meta(job.model)
    model.keep(job.cuts, chunks)
    state = engine_state(job.run, model, job.precision, device, degrees.dp * degrees.cp)
    ranks = range(degrees.tp)
    return state, [rank_shards(job.model, degrees, rank, job.cuts, chunks) for rank in ranks]


def scoring_memory(job: Job, *, activations: bool) -> dict[str, int]:
    """Return the bytes by part on a rank that scores a checkpoint.

    The run's state stays. The rank also loads unsharded weights, on a GPU through fp32 on the host.
    `activations` adds the largest batch's activations.
    """
    from ...models.accounting.count import build_meta
    from ...models.accounting.state import HOST, device_bytes
    from ...models.config.options.precision import default_precision

    device = job.run.device
    assert device != "auto"
    stages = range(job.run.layout.pp)
    state = max((sizes for stage in stages for sizes in state_memory(job, stage)), key=device_bytes)
    model = build_meta(job.model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model.cast(default_precision(device))
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    sizes = {"state": device_bytes(state), "whole weights": weight_bytes}
    sizes |= {part: size for part, size in state.items() if part.startswith(HOST)}
    if device != "cpu":
        sizes[f"{HOST}loading"] = NUMBER_BYTES * num_parameters
    return sizes | (batch_memory(job.model, largest_batch(job)) if activations else {})


def generation_caches(job: Job) -> int:
    """Return the bytes in states and caches while a task generates a batch."""
    from ...models.accounting.memory import generation_bytes

    shape = largest_batch(job)
    return shape.rows * generation_bytes(job.model, shape.seq_len, precision=shape.precision)


def largest_batch(job: Job) -> Shape:
    """Return the shape of a scoring batch with the longest contexts, on an unsharded model."""
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
    """Return the peak bytes by part while a batch is scored: in a layer, or in the head.

    A layer counts as in a training step that recomputes all blocks, whose forward pass saves only
    the block's output. The head runs on fake tensors.
    """
    from ...models.accounting.level import ACTIVATIONS, INPUTS, LOGITS
    from ...models.accounting.passes import model_passes
    from ...models.accounting.pieces import find_peak
    from ...models.accounting.step import stream_bytes
    from ...models.config.options.recompute import expand_rules

    passes = model_passes(config, shape, expand_rules("block", len(config.layers)))
    stream = stream_bytes(shape, config.width)
    embeddings = stream if any(layer.shared for layer in config.layers) else 0
    layer_bytes = embeddings + stream + max(find_peak(layer.forward) for layer in passes.layers)
    hidden_bytes, logit_bytes = _head_bytes(config, shape)
    # ids, positions and targets, which tensor-parallel ranks do not divide
    inputs = {INPUTS: 3 * 8 * _local_tokens(shape) * shape.degrees.tp}
    if layer_bytes > hidden_bytes + logit_bytes:
        return {ACTIVATIONS: layer_bytes, **inputs}
    return {ACTIVATIONS: hidden_bytes, LOGITS: logit_bytes, **inputs}


def _head_bytes(config: ModelConfig, shape: Shape) -> tuple[int, int]:
    """Return the peak bytes in the final norm over all tokens, and in a chunk's logits."""
    import torch

    from ...models.accounting.fake.model import FakeModel
    from ...models.accounting.layer_kinds import reduce_to_kinds
    from ...models.accounting.state import Degrees
    from ...models.model.model import Model
    from ..scores.likelihood import POSITIONS, score_positions

    tokens = _local_tokens(shape)

    def norm(model: Model) -> None:
        hidden = model.norm(torch.empty(1, tokens, config.width))
        hidden[0][torch.arange(tokens)]

    def logits(model: Model) -> None:
        chunk = min(POSITIONS, tokens * shape.degrees.tp)
        score_positions(
            model, torch.empty(chunk, config.width), torch.zeros(chunk, dtype=torch.int64)
        )

    model = FakeModel(reduce_to_kinds(config), replace(shape, rows=1, seq_len=1, degrees=Degrees()))
    return model.peak_bytes(norm), model.peak_bytes(logits) // shape.degrees.tp


def _local_tokens(shape: Shape) -> int:
    return shape.rows * shape.seq_len // shape.degrees.cp // shape.degrees.tp


def timelines(job: Job, stage: int) -> list[Timeline]:
    """Return a step's memory timelines by tensor rank in a stage, for the phase with the highest
    peak."""
    from ...models.accounting.passes import model_passes
    from ...models.accounting.shape import Shape
    from ...models.accounting.step import input_bytes, stream_bytes

    layout, degrees, device = job.run.layout, _degrees(job), job.run.device
    assert device != "auto"
    state, shards_by_rank = _stage_state(job, stage)
    highest: list[Timeline] = []
    for phase in split_by_length(job.plan):
        rows = micro_rows(job.run.micro_batch_tokens, phase, job.dp, degrees.cp)
        shape = Shape(
            rows=rows,
            seq_len=phase.seq_len,
            precision=job.precision,
            device=device,
            degrees=degrees,
            **layout.row_forms,
            linear=state.linear,
            threads=job.threads if device == "cpu" else 1,
        )
        passes = model_passes(job.model, shape, job.rules)
        num_micro_batches = micro_batches(rows, phase, job.dp)
        inputs, stream = input_bytes(shape), stream_bytes(shape, job.model.width)
        phase_timelines = [
            step_memory(
                passes,
                state.memory(shards, degrees),
                layout,
                job.cuts,
                stage,
                num_micro_batches,
                inputs,
                stream,
            )
            for shards in shards_by_rank
        ]
        if not highest or phase_timelines[0].highest > highest[0].highest:
            highest = phase_timelines
    return highest


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
    """Compute a step's memory timeline on a rank in `stage`. The dry run, the error of a rank that
    runs out of memory, and the planner count by it. `inputs` are bytes per micro-batch, and
    `stream` the bytes of a tensor that it passes to the next stage.

    The timeline contains as many equal micro-batches as its peak needs, or `every` micro-batch.
    """
    from ...models.accounting.step import cut_passes, timeline
    from ...models.config.config import chunk_layers

    num_counted = micro_batches
    if not every:
        num_counted = layout.pipeline_schedule.sample_size(layout.pp, micro_batches)
    actions = list_actions(layout.schedule, layout.pp, layout.chunks, num_counted, stage)
    chunks = cut_passes(passes, chunk_layers(len(passes.layers), cuts))
    return timeline(chunks, engine, actions, inputs, stream)


@lru_cache(maxsize=128)
def list_actions(
    schedule: str, stages: int, chunks: int, micro_batches: int, stage: int
) -> Sequence[Action]:
    """List a stage's passes, with the messages before each."""
    from ...models.accounting.step import Action
    from ..layout.messages import messages_by_action

    orders = _list_orders(schedule, stages, chunks, micro_batches)
    return [
        Action(
            kind=action.kind,
            chunk=action.chunk,
            micro=action.micro,
            received=tuple(receiver.chunk for receiver in messages.received),
            arrived=tuple(s.chunk for s in messages.arrived if s.kind == "backward"),
        )
        for action, messages in messages_by_action(orders, stage).items()
    ]


@lru_cache(maxsize=4)
def _list_orders(schedule: str, stages: int, chunks: int, micro_batches: int) -> Orders:
    return SCHEDULES[schedule].orders(stages, chunks, micro_batches)


def _degrees(job: Job) -> Degrees:
    from ...models.accounting.state import Degrees

    layout = job.run.layout
    return Degrees(dp=job.dp, tp=layout.tp, cp=layout.cp, ep=layout.ep)
