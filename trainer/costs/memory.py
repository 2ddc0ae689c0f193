"""Costs of a run, counted before it starts: parameters, batches, memory, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..loop.batches import micro_batches, micro_rows
from ..pipeline.simulate import most_alive
from ..run.job import Job

if TYPE_CHECKING:
    from ...models.accounting.state import Degrees

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
    states = job.run.optimizer.states(model)
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
    from .state import engine_state

    degrees, device = _degrees(job), job.run.device
    assert device != "auto"
    own = chunks_of(job.run.layout, stage)
    model = build_meta(job.model)
    model.keep(job.cuts, own)
    state = engine_state(job.run, model, job.precision, device)
    shards = [rank_shards(job.model, degrees, n, job.cuts, own) for n in range(degrees.tp)]
    return [state_bytes(state.parts, each, degrees) for each in shards]


def kept_memory(job: Job) -> list[dict[str, int]]:
    """Return the bytes that each stage keeps for its backward passes, in the phase that keeps most.

    A stage keeps the activations of all micro-batches that its schedule has alive at once, and the
    last stage the logits of one.
    """
    from ...models.accounting.memory import kept_by_layer, loss_bytes
    from ...models.model import chunk_layers
    from ..layout.stages import chunks_of

    layout, degrees = job.run.layout, _degrees(job)
    chunks = chunk_layers(len(job.model.layers), job.cuts)
    ranks = degrees.tp * degrees.cp
    most = [{"activations": 0, "logits": 0} for _ in range(layout.pp)]
    for phase in job.plan.phases:
        rows = micro_rows(job.run.micro_batch_tokens, phase, job.dp, degrees.cp)
        kept = kept_by_layer(job.model, phase.seq_len, rows=rows, precision=job.precision)
        tokens = rows * phase.seq_len
        loss = loss_bytes(job.model, kept, tokens, job.precision, degrees, job.run.device)
        layers, again = kept.by_layer(job.rules)
        sizes = [float(sum(layers[chunk.start : chunk.stop])) for chunk in chunks]
        orders = layout.orders(micro_batches(rows, phase, job.dp))
        for stage, order in enumerate(orders):
            own = [layer for chunk in chunks_of(layout, stage) for layer in chunks[chunk]]
            alive = most_alive(order, sizes) + max(again[layer] for layer in own)
            logits = loss if stage == layout.pp - 1 else 0
            for name, size in (("activations", round(alive / ranks)), ("logits", logits)):
                most[stage][name] = max(most[stage][name], size)
    return most


def _degrees(job: Job) -> Degrees:
    from ...models.accounting.state import Degrees

    layout = job.run.layout
    return Degrees(dp=job.dp, tp=layout.tp, cp=layout.cp, ep=layout.ep)
