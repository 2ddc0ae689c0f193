"""Stages of a run's pipeline: layers, bubbles and messages, counted before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layout.cuts import pass_costs
from ..layout.simulate import Timeline, simulate
from ..layout.stages import chunks_of
from ..loop.batches import micro_batches, micro_rows
from ..run.job import Job

ENOUGH = 2
"""Micro-batches for each stage below which a run is warned."""


def stages(job: Job) -> list[dict[str, Any]]:
    """Return the layers and the parameters of each stage."""
    from ...models.accounting.count import build_meta, parameters
    from ...models.config.config import chunk_layers

    chunks = chunk_layers(len(job.model.layers), job.cuts)
    found = []
    for stage in range(job.run.layout.pp):
        own = chunks_of(job.run.layout, stage)
        model = build_meta(job.model)
        model.keep(job.cuts, own)
        layers = [[chunks[chunk].start, chunks[chunk].stop - 1] for chunk in own]
        found.append({"stage": stage, "layers": layers, "parameters": parameters(model)})
    return found


def pipelines(job: Job) -> list[dict[str, Any]]:
    """Return, for each phase, the largest bubble of a stage, and the messages of a data-parallel
    replica in a step: activations, with the embeddings while a later layer calls a shared block,
    and their gradients."""
    layout, layers = job.run.layout, job.model.layers
    tensors = [1 + any(layer.shared for layer in layers[cut:]) for cut in job.cuts]
    found = []
    for phase in job.plan.phases:
        rows = micro_rows(job.run.micro_batch_tokens, phase, job.dp, layout.cp)
        number = micro_batches(rows, phase, job.dp)
        stream = rows * phase.seq_len * job.model.width * job.precision.weight_bytes
        found.append(
            {
                "phase": phase.name,
                "micro_batches": number,
                "bubble": max(timeline(job, number, phase.seq_len).bubbles),
                "messages": 2 * sum(tensors) * number * layout.cp * layout.tp,
                "message_bytes": 2 * sum(tensors) * number * stream,
            }
        )
    return found


def timeline(job: Job, number: int, seq_len: int) -> Timeline:
    """Simulate a step of so many micro-batches; times are the layers' operations."""
    return simulate(job.run.layout.orders(number), pass_costs(job.cuts, *_costs(job, seq_len)))


def stage_work(job: Job, seq_len: int) -> list[float]:
    """Return the operations of each stage for rows of a length."""
    forward = pass_costs(job.cuts, *_costs(job, seq_len))["forward"]
    layout = job.run.layout
    return [sum(forward[n] for n in chunks_of(layout, stage)) for stage in range(layout.pp)]


def _costs(job: Job, seq_len: int) -> tuple[Sequence[float], float]:
    from ...models.accounting.count import build_meta, flops_by_layer

    *layers, head = flops_by_layer(build_meta(job.model), seq_len)
    return layers, head


def warnings(job: Job) -> list[str]:
    """Return what a person may want to change before the run starts."""
    pp = job.run.layout.pp
    return [
        f"phase {each['phase']} has {each['micro_batches']} micro-batch"
        f"{'es' * (each['micro_batches'] > 1)} in a step, fewer than "
        f"{ENOUGH} for each of the {pp} stages: {each['bubble']:.0%} of a step is idle; use "
        "smaller micro_batch_tokens, a larger batch, or fewer stages"
        for each in (pipelines(job) if pp > 1 else ())
        if each["micro_batches"] < ENOUGH * pp
    ]
