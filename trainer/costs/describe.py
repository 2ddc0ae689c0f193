"""Description of a run before it starts, for `--dry-run`, the terminal and the report."""

from __future__ import annotations

import textwrap
from typing import Any

from ...console import config as reader
from ...console.progress import as_bytes, human
from ...models.accounting.show import letters_of, shown_active
from ..run.config import COUPLED
from ..run.job import Job
from . import memory as costs

GIGABYTE = 1 << 30


def describe(job: Job, *, activations: bool = False) -> dict[str, Any]:
    """Return the description; counting activations takes a few seconds, so it is optional."""
    kept = costs.kept_memory(job) if activations else {}
    by_rank = [state | kept for state in costs.state_memory(job)]
    return {
        "run": str(job.folder.root),
        "begun": job.folder.begun,
        "model": {
            "stripe": stripe(job),
            **costs.parameters(job),
            "vocab_size": job.model.vocab_size,
            "couples_rows": job.model.couples_rows,
        },
        "plan": {
            "hash": job.plan.hash,
            "tokens": job.plan.tokens,
            "steps": job.plan.steps,
            "sources": [source.name for source in job.plan.sources],
        },
        "layout": job.layout,
        "groups": costs.groups(job),
        "batch": costs.batches(job),
        "memory": max(by_rank, key=lambda parts: sum(parts.values())),
        "memory_by_tensor_rank": by_rank,
        "checkpoints": {"bytes": costs.checkpoint_bytes(job), "saved": costs.checkpoints(job)},
        "configuration": reader.plain(job.run),
    }


def stripe(job: Job) -> str:
    """Return one letter for each layer, as in `headrace models show`: `[SMLAT]`."""
    kinds = [str(layer) for layer in job.model.layers]
    letters = letters_of(kinds)
    return f"[{''.join(letters[kind] for kind in kinds)}]"


def lines(about: dict[str, Any]) -> list[str]:
    """Format the description for a person."""
    model, plan, layout = about["model"], about["plan"], about["layout"]
    text = [
        f"run          {about['run']}{' (resumes)' if about['begun'] else ''}",
        f"model        {model['stripe']}  {model['parameters']:,} parameters"
        f"{shown_active(model['parameters'], model['active_parameters'])}, vocabulary "
        f"{model['vocab_size']:,}",
        f"plan         {plan['hash']}: {human(plan['tokens'])} tokens, {plan['steps']:,} steps, "
        f"sources {', '.join(plan['sources'])}",
        f"layout       {layout['engine']}, {layout['processes']} × {layout['device']} = "
        f"dp {layout['dp']} × tp {layout['tp']} × cp {layout['cp']}, {layout['precision']}",
    ]
    for phase in about["batch"]:
        text.append(
            f"phase        {phase['phase']}: {human(phase['tokens'])} tokens, {phase['steps']:,} "
            f"steps of {phase['rows']} rows × {phase['seq_len']:,}; each rank "
            f"{phase['micro_batches']} × {phase['micro_batch_rows']} rows"
        )
    if model["couples_rows"]:
        text.append(f"micro-batch  {COUPLED.format(', '.join(model['couples_rows']))}")
    if any(group["match"] for group in about["groups"]):
        text += [f"group        {_group(group)}" for group in about["groups"]]
    text += [f"decay        {line}" for line in _decay(about["groups"])]
    text += [f"memory       {line}" for line in _memory(about["memory_by_tensor_rank"])]
    saved = about["checkpoints"]
    text.append(f"checkpoints  {saved['saved']} of {as_bytes(saved['bytes'])} each")
    return text


def _group(group: dict[str, Any]) -> str:
    return (
        f"{group['match'] or 'all others'}: {group['parameters']:,} parameters, peak rate "
        f"{group['lr']:g}, decay {group['weight_decay']:g}, {', '.join(group['states'])}"
    )


def _decay(groups: list[dict[str, Any]]) -> list[str]:
    """Return a line for each weight decay: its parameters, as patterns of names."""
    decays = sorted({group["weight_decay"] for group in groups}, reverse=True)
    text = []
    for decay in decays:
        alike = [group for group in groups if group["weight_decay"] == decay]
        count = sum(group["parameters"] for group in alike)
        names = sorted({name for group in alike for name in group["names"]})
        shown = f"{decay:g}" if decay else "none"
        text.append(f"{shown}: {count:,} parameters: {', '.join(names)}")
    return text


def _memory(by_rank: list[dict[str, int]]) -> list[str]:
    """Return a line for each tensor rank, or one line if all are equal."""
    alike = all(parts == by_rank[0] for parts in by_rank)
    text = []
    for rank, parts in enumerate(by_rank[:1] if alike else by_rank):
        where = "each rank" if alike else f"each rank of tensor rank {rank}"
        named = ", ".join(f"{part} {_size(size)}" for part, size in parts.items() if size)
        more = "" if "activations" in parts else ", and activations"
        text.append(f"{_size(sum(parts.values()))} on {where} ({named}){more}")
    return text


def configuration(about: dict[str, Any]) -> str:
    """Format the resolved configuration with all defaults."""
    return f"configuration\n{textwrap.indent(reader.dump(about['configuration']), '  ')}"


def _size(size: int) -> str:
    unit, name = (GIGABYTE, "GiB") if size >= GIGABYTE / 10 else (1 << 20, "MiB")
    return f"{size / unit:.3g} {name}"
