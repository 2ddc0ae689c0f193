"""What a job costs, counted before it runs: parameters, batches, memory, checkpoints."""

from __future__ import annotations

from typing import Any

from ..loop.batches import micro_batches, micro_rows
from ..run.run import Job

STATE_BYTES = 12
"""Of a checkpoint, for each parameter: master, exp_avg, exp_avg_sq in fp32."""
CUT_FROM = {"masters": 1, "gradients": 2, "weights": 3}
"""The ZeRO stage from which on a part is divided among processes."""


def parameters(job: Job) -> int:
    from ...models.accounting.count import build_meta
    from ...models.accounting.count import parameters as count

    return count(build_meta(job.model))


def parameters_by_rank(job: Job) -> list[int]:
    """Of the part of the model that each process along the tensor axis has."""
    from ...models.accounting.count import build_meta
    from ...models.accounting.count import parameters as count
    from ...models.parallel.axes import Axes, Axis

    found = []
    for rank in range(job.run.layout.tp):
        model = build_meta(job.model)
        model.shard(Axes(tensor=Axis(None, rank, job.run.layout.tp)))
        found.append(count(model))
    return found


def checkpoint_bytes(job: Job) -> int:
    return STATE_BYTES * parameters(job)


def checkpoints(job: Job) -> int:
    """How many the run saves."""
    first, last = job.plan.first_step, job.plan.last_step
    planned = {step for step in range(first + 1, last) if step % job.run.checkpoints.every == 0}
    return len(planned | set(job.ends))


def batches(job: Job) -> list[dict[str, Any]]:
    """Each phase's rows, micro-batches and steps."""
    found = []
    for phase in job.plan.phases:
        rows = micro_rows(job.run.micro_batch_tokens, phase, job.dp, job.run.layout.cp)
        found.append(
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
    return found


def state_memory(job: Job, count: int) -> dict[str, int]:
    """Bytes of the state on a process, by part, for so many parameters that it has a part of.
    Activations come on top."""
    engine = job.run.engine
    half = job.precision.separate_masters
    stage = getattr(engine, "zero", 3)
    shards = getattr(engine, "shard", None) or job.dp * job.run.layout.cp
    weights = (2 if half else 4) * count
    cut = {part: shards if stage >= least else 1 for part, least in CUT_FROM.items()}
    separate = half or stage in (1, 2)  # in fp32, the weights are the masters otherwise
    return {
        "weights": weights // cut["weights"],
        "gradients": 4 * count // cut["gradients"],
        "masters": 4 * count // cut["masters"] if separate else 0,
        "moments": 8 * count // cut["masters"],
    }


def kept_memory(job: Job) -> dict[str, int]:
    """What a micro-batch keeps for its backward pass, of the phase that keeps most."""
    from ...models.accounting.memory import Layout
    from ...models.accounting.memory import memory as of_model

    layout = job.run.layout
    precision: Any = job.run.precision
    found = []
    for phase in job.plan.phases:
        rows = micro_rows(job.run.micro_batch_tokens, phase, job.dp, layout.cp)
        shape = Layout(tp=layout.tp, cp=layout.cp)
        found.append(
            of_model(job.model, phase.seq_len, rows=rows, precision=precision, layout=shape)
        )
    return {
        "activations": max(each["activations"][job.run.recompute] for each in found),
        "logits": max(each["logits"] for each in found),
    }
