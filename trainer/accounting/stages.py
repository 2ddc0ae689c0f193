"""Describe a run's pipeline before it starts: stages, bubbles and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layout.cuts import pass_costs
from ..layout.simulate import StepTimeline, simulate
from ..layout.stages import list_chunks
from ..loop.batches import micro_batches, micro_rows
from ..run.job import Job

MIN_MICRO_BATCHES = 2
"""Micro-batches per stage below which a person is warned."""


def describe_stages(job: Job) -> list[dict[str, Any]]:
    """Return the layer ranges and the number of parameters by stage."""
    from ...models.accounting.count import build_meta, count_parameters
    from ...models.config.config import chunk_layers

    chunks = chunk_layers(len(job.model.layers), job.cuts)
    stages = []
    for stage in range(job.run.layout.pp):
        stage_chunks = list_chunks(job.run.layout, stage)
        model = build_meta(job.model)
        model.keep(job.cuts, stage_chunks)
        layers = [[chunks[chunk].start, chunks[chunk].stop - 1] for chunk in stage_chunks]
        stages.append({"stage": stage, "layers": layers, "parameters": count_parameters(model)})
    return stages


def describe_pipelines(job: Job) -> list[dict[str, Any]]:
    """Return, by phase, the largest bubble in any stage, and a data-parallel replica's messages per
    step.

    Messages are activations and their gradients; the embeddings travel too while a later layer
    calls a shared block.
    """
    layout, layers = job.run.layout, job.model.layers
    num_tensors = sum(1 + any(layer.shared for layer in layers[cut:]) for cut in job.cuts)
    pipelines = []
    for phase in job.plan.phases:
        rows = micro_rows(job.run.micro_batch_tokens, phase, job.dp, layout.cp)
        num_micro_batches = micro_batches(rows, phase, job.dp)
        tensor_bytes = rows * phase.seq_len * job.model.width * job.precision.weight_bytes
        pipelines.append(
            {
                "phase": phase.name,
                "micro_batches": num_micro_batches,
                "bubble": max(simulate_step(job, num_micro_batches, phase.seq_len).bubbles),
                "messages": 2 * num_tensors * num_micro_batches * layout.cp * layout.tp,
                "message_bytes": 2 * num_tensors * num_micro_batches * tensor_bytes,
            }
        )
    return pipelines


def simulate_step(job: Job, num_micro_batches: int, seq_len: int) -> StepTimeline:
    """Simulate a step whose passes take as long as their layers have FLOPs."""
    costs = pass_costs(job.cuts, *_layer_flops(job, seq_len))
    return simulate(job.run.layout.orders(num_micro_batches), costs)


def stage_flops(job: Job, seq_len: int) -> list[float]:
    """Return the forward FLOPs by stage, for rows with `seq_len` tokens."""
    forward = pass_costs(job.cuts, *_layer_flops(job, seq_len))["forward"]
    layout = job.run.layout
    return [sum(forward[chunk] for chunk in list_chunks(layout, n)) for n in range(layout.pp)]


def _layer_flops(job: Job, seq_len: int) -> tuple[Sequence[float], float]:
    """Return the FLOPs by layer, and in the head."""
    from ...models.accounting.count import build_meta, flops_by_layer

    *layers, head = flops_by_layer(build_meta(job.model), seq_len)
    return layers, head


def warnings(job: Job) -> list[str]:
    """Return a warning for each phase with too few micro-batches."""
    pp = job.run.layout.pp
    return [
        f"phase {phase['phase']} has {phase['micro_batches']} micro-batch"
        f"{'es' * (phase['micro_batches'] > 1)} in a step, fewer than {MIN_MICRO_BATCHES} for "
        f"each of the {pp} stages: {phase['bubble']:.0%} of a step is idle; use smaller "
        "micro_batch_tokens, a larger batch, or fewer stages"
        for phase in (describe_pipelines(job) if pp > 1 else ())
        if phase["micro_batches"] < MIN_MICRO_BATCHES * pp
    ]
