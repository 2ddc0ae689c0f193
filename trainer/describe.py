"""What a job is and costs, before it runs: for `--dry-run`, the terminal and the report."""

from __future__ import annotations

import textwrap
from typing import Any

from ..console import config as reader
from ..console.progress import as_bytes, human
from . import job as jobs
from .job import Job
from .schedule import micro_rows

GIGABYTE = 1 << 30


def describe(job: Job, *, activations: bool = False) -> dict[str, Any]:
    """Activations take a moment to count: they are for who asks before the run."""
    count, by_rank = jobs.parameters(job), jobs.parameters_by_rank(job)
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
        "memory": memory(job, max(by_rank)) | (_kept(job) if activations else {}),
        "parameters_by_tensor_rank": by_rank,
        "checkpoints": {"bytes": jobs.checkpoint_bytes(job), "saved": saves},
        "configuration": reader.plain(job.run),
    }


def stripe(job: Job) -> str:
    """The model's pattern, a letter for each layer: `SML·M·A`."""
    letters = [layer.mixer[0].upper() for layer in job.model.layers]
    return f"[{''.join(letters)}]"


def memory(job: Job, count: int) -> dict[str, int]:
    """Bytes of the state on each process, by part, for so many parameters that it has a part of.
    Activations come on top."""
    engine = job.run.engine
    half = job.run.precision == "bf16"
    stage = getattr(engine, "zero", 3)
    shards = getattr(engine, "shard", None) or job.dp * job.run.layout.cp
    weights = (2 if half else 4) * count
    cut = {part: shards if stage >= least else 1 for part, least in _CUT_FROM.items()}
    separate = half or stage in (1, 2)  # in fp32, the weights are the masters otherwise
    return {
        "weights": weights // cut["weights"],
        "gradients": 4 * count // cut["gradients"],
        "masters": 4 * count // cut["masters"] if separate else 0,
        "moments": 8 * count // cut["masters"],
    }


def _kept(job: Job) -> dict[str, int]:
    """What a micro-batch keeps for its backward pass, of the phase that keeps most."""
    from ..models.memory import Layout
    from ..models.memory import memory as of_model

    precision, layout = job.run.precision, job.run.layout
    assert precision != "auto"
    found = []
    for phase in job.plan.phases:
        rows = micro_rows(job.run.micro_batch_tokens, phase, job.dp, job.run.layout.cp)
        shape = Layout(tp=layout.tp, cp=layout.cp)
        found.append(
            of_model(job.model, phase.seq_len, rows=rows, precision=precision, layout=shape)
        )
    return {
        "activations": max(each["activations"][job.run.recompute] for each in found),
        "logits": max(each["logits"] for each in found),
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
    parts = ", ".join(f"{part} {_size(size)}" for part, size in about["memory"].items() if size)
    counted = "" if "activations" in about["memory"] else ", and activations"
    found.append(
        f"memory       {_size(sum(about['memory'].values()))} on each process ({parts}){counted}"
    )
    saved = about["checkpoints"]
    found.append(f"checkpoints  {saved['saved']} of {as_bytes(saved['bytes'])} each")
    return found


def configuration(about: dict[str, Any]) -> str:
    """What the run's YAML comes to, with everything that was left out."""
    return f"configuration\n{textwrap.indent(reader.dump(about['configuration']), '  ')}"


def _size(size: int) -> str:
    unit, name = (GIGABYTE, "GiB") if size >= GIGABYTE / 10 else (1 << 20, "MiB")
    return f"{size / unit:.3g} {name}"


def _saves(job: Job) -> int:
    first, last = job.plan.first_step, job.plan.last_step
    every = job.run.checkpoints.every
    edges = {phase.first_step + phase.steps for phase in job.plan.phases}
    return len({step for step in range(first + 1, last) if step % every == 0} | edges)
