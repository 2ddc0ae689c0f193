"""What a job is and costs, before it runs: for `--dry-run`, the terminal and the report."""

from __future__ import annotations

from typing import Any

from ..console import config as reader
from ..console.progress import as_bytes, human
from . import job as jobs
from .job import Job

GIGABYTE = 1 << 30


def describe(job: Job) -> dict[str, Any]:
    count = jobs.parameters(job)
    saves = _saves(job)
    return {
        "run": str(job.folder.root),
        "begun": job.folder.begun,
        "model": {
            "stripe": stripe(job),
            "parameters": count,
            "vocab_size": job.model.vocab_size,
        },
        "plan": {
            "hash": job.plan.hash,
            "tokens": job.plan.tokens,
            "steps": job.plan.last_step - job.plan.first_step,
            "sources": [source.name for source in job.plan.sources],
        },
        "layout": {
            "engine": job.run.engine.describe(),
            "processes": job.processes,
            "dp": job.dp,
            "tp": job.run.layout.tp,
            "cp": job.run.layout.cp,
            "device": job.run.device,
            "precision": job.run.precision,
            "threads": job.threads,
        },
        "batch": jobs.arithmetic(job),
        "memory": memory(job, count),
        "checkpoints": {"bytes": jobs.checkpoint_bytes(job), "saved": saves},
        "configuration": reader.plain(job.run),
    }


def stripe(job: Job) -> str:
    """The model's pattern, a letter for each layer: `SML·M·A`."""
    letters = [layer.mixer[0].upper() for layer in job.model.layers]
    return f"[{''.join(letters)}]"


def memory(job: Job, count: int) -> dict[str, int]:
    """Bytes of the state on each process, by part. Activations come on top."""
    engine = job.run.engine
    half = job.run.precision == "bf16"
    stage = getattr(engine, "zero", 3)
    shards = getattr(engine, "shard", None) or job.dp
    weights = (2 if half else 4) * count
    cut = {part: shards if stage >= least else 1 for part, least in _CUT_FROM.items()}
    separate = half or stage in (1, 2)  # in fp32, the weights are the masters otherwise
    return {
        "weights": weights // cut["weights"],
        "gradients": 4 * count // cut["gradients"],
        "masters": 4 * count // cut["masters"] if separate else 0,
        "moments": 8 * count // cut["masters"],
    }


_CUT_FROM = {"masters": 1, "gradients": 2, "weights": 3}
"""The ZeRO stage from which on a part is divided among processes."""


def lines(about: dict[str, Any]) -> list[str]:
    """The description as a person reads it."""
    model, plan, layout = about["model"], about["plan"], about["layout"]
    found = [
        f"run          {about['run']}{' (goes on)' if about['begun'] else ''}",
        f"model        {model['stripe']}  {model['parameters']:,} parameters, vocabulary "
        f"{model['vocab_size']:,}",
        f"plan         {plan['hash']}: {human(plan['tokens'])} tokens, {plan['steps']:,} steps, "
        f"sources {', '.join(plan['sources'])}",
        f"layout       {layout['engine']}, {layout['processes']} × {layout['device']} = "
        f"dp {layout['dp']} × tp {layout['tp']} × cp {layout['cp']}, {layout['precision']}",
    ]
    for phase in about["batch"]:
        found.append(
            f"phase        {phase['phase']}: {human(phase['tokens'])} tokens, {phase['steps']:,} "
            f"steps of {phase['rows']} rows × {phase['seq_len']:,}; each process "
            f"{phase['micro_batches']} × {phase['micro_batch_rows']} rows"
        )
    parts = ", ".join(
        f"{part} {size / GIGABYTE:.3f}" for part, size in about["memory"].items() if size
    )
    total = sum(about["memory"].values()) / GIGABYTE
    found.append(f"memory       {total:.3f} GiB of state on each process ({parts}) + activations")
    saved = about["checkpoints"]
    found.append(f"checkpoints  {saved['saved']} of {as_bytes(saved['bytes'])} each")
    return found


def _saves(job: Job) -> int:
    first, last = job.plan.first_step, job.plan.last_step
    every = job.run.checkpoints.every
    edges = {phase.first_step + phase.steps for phase in job.plan.phases}
    return len({step for step in range(first + 1, last) if step % every == 0} | edges)
