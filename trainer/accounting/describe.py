"""Description of a run before it starts, for `--dry-run`, the terminal and the report."""

from __future__ import annotations

import textwrap
from typing import Any

from ...console import config as reader
from ...console.progress import as_bytes, human
from ...models.accounting.show import letters_of, shown_active
from ...models.accounting.state import HOST, device_bytes, host_bytes
from ...models.accounting.stored import stored
from ..loop.evaluate import missing_note, plan_of, unnamed
from ..run.config import COUPLED
from ..run.job import Job
from . import memory as costs
from . import stages as pipeline

AXES = ("pp", "dp", "tp", "cp")
UNCOUNTED = ("seed", "init_from", "synthetic", "data", "evaluate", "checkpoints", "slurm")
"""Keys of a run that no count depends on; rows are counted by phase."""


def describe(job: Job, *, activations: bool = False) -> dict[str, Any]:
    """Return the description; `activations` counts the memory of a step, which takes a second or
    two, instead of the state alone."""
    counts, evaluated = counted(job, activations=activations), held_out(job)
    score = counts["scoring"]
    scored = [score["memory"]] if score is not None else []
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
        "fp8": counts["fp8"],
        "experts": experts(job),
        "groups": costs.groups(job),
        "batch": costs.batches(job),
        "memory": max([*counts["memory"], *scored], key=device_bytes),
        "memory_by_tensor_rank": counts["memory"],
        "scoring": score,
        "stages": counts["stages"],
        "pipeline": counts["pipeline"],
        "held_out": evaluated,
        "warnings": [*counts["warnings"], *not_evaluated(job, evaluated or {})],
        "checkpoints": {"bytes": costs.checkpoint_bytes(job), "saved": costs.checkpoints(job)},
        "configuration": reader.plain(job.run),
    }


def counted(job: Job, *, activations: bool) -> dict[str, Any]:
    """Return what only a built or traced model gives. It is stored: a second dry run needs no
    torch."""

    def count() -> dict[str, Any]:
        stages = pipeline.stages(job)
        by_stage = [
            [each.parts for each in costs.timelines(job, stage)]
            if activations
            else costs.state_memory(job, stage)
            for stage in range(len(stages))
        ]
        for stage, by_rank in zip(stages, by_stage, strict=True):
            stage["memory"] = max(by_rank, key=device_bytes)
        return {
            "stages": stages,
            "memory": max(by_stage, key=lambda by_rank: max(map(device_bytes, by_rank))),
            "scoring": scoring(job, activations=activations),
            "fp8": fp8(job),
            "pipeline": pipeline.pipelines(job) if job.run.layout.pp > 1 else [],
            "warnings": [*pipeline.warnings(job), *eager_operators(job), *emulation(job)],
        }

    run = {key: value for key, value in reader.plain(job.run).items() if key not in UNCOUNTED}
    run["optimizer"] = {name: run["optimizer"][name] for name in run["optimizer"] if name != "lr"}
    phases = [(phase.name, phase.seq_len, phase.batch_rows) for phase in job.plan.phases]
    question = f"described {activations} {job.model!r} {run} {phases} {job.layout}"
    return stored(question, count, source=costs.TRAINER)


def scoring(job: Job, *, activations: bool) -> dict[str, Any] | None:
    """Return the memory of a rank that scores a checkpoint, and of the caches of tasks that
    generate; None if the run scores none."""
    if job.run.scores is None:
        return None
    return {
        "memory": costs.scoring_memory(job, activations=activations),
        "generation": costs.generation_caches(job),
    }


def held_out(job: Job) -> dict[str, dict[str, Any]] | None:
    """Return the dataset and the rows that each source is evaluated on, or `rows_of`: the source
    that shares them, None for none. Return None if the run evaluates nothing."""
    from ...dataplane.order.plan import Plan

    if job.run.evaluate is None:
        return None
    stored = job.held_out.exists()
    plan = Plan.load(job.held_out) if stored else plan_of(job.run.evaluate, job.plan)
    named: dict[str, dict[str, Any]] = {
        source.name: {"url": source.url, "rows": phase.rows, "seq_len": phase.seq_len}
        for source, phase in zip(plan.sources, plan.phases, strict=True)
    }
    urls = {name: source["url"] for name, source in named.items()}
    others = unnamed(job.run.evaluate, job.plan, urls)
    return {**named, **{name: {"rows_of": owner} for name, owner in others.items()}}


def not_evaluated(job: Job, evaluated: dict[str, dict[str, Any]]) -> list[str]:
    """Return a warning that names the sources without held-out rows."""
    names = [name for name, source in evaluated.items() if source.get("rows_of", name) is None]
    return [missing_note(names, job.run.evaluate.split)] if names and job.run.evaluate else []


def experts(job: Job) -> list[str]:
    """Return a line for each operator whose experts the ranks split."""
    ep, ranks = job.run.layout.ep, job.processes // job.run.layout.pp
    counts = {name: options.expert_count for name, options in job.model.operators.items()}
    return [
        f"{name}: {count // ep} of {count} on each rank, {ranks // ep} replicas of each expert"
        for name, count in counts.items()
        if count is not None and ep > 1
    ]


def fp8(job: Job) -> str:
    """Return the share of products in FP8 in words; empty for another precision."""
    from ...models.accounting.count import build_meta
    from ...models.transforms.fp8 import summary

    if job.precision.fp8 is None:
        return ""
    found = summary(build_meta(job.model), job.precision.fp8)
    return (
        f"{found['share']:.1%} of the FLOPs of matrices; in training, where gradients of weights "
        f"stay in bf16, {found['training_share']:.1%}"
    )


def emulation(job: Job) -> list[str]:
    """Return a warning if the device has no units for FP8."""
    if job.precision.fp8 is None or job.run.device == "cuda":
        return []
    return [
        "the CPU emulates FP8: values are rounded as on a GPU, and products are slower than bf16"
    ]


def eager_operators(job: Job) -> list[str]:
    """Return a line for each operator that torch.compile leaves out of its graphs."""
    if not job.run.engine.compile:
        return []
    import torch

    from ...models.accounting.count import build_meta
    from ...models.parallel.axes import Axes, Axis
    from ...models.transforms.compilation import left_out

    layout = job.run.layout
    axes = Axes(
        context=Axis(None, 0, layout.cp),
        experts=Axis(None, 0, layout.ep),
        attention=layout.attention,
        hyena_li=layout.hyena_li,
    )
    found = left_out(build_meta(job.model), axes, torch.device(job.run.device))
    return [f"engine.compile: `{name}` runs eagerly: {reason}" for name, reason in found.items()]


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
        f"{degrees(layout)}, {layout['precision']}",
    ]
    text += [f"fp8          {about['fp8']}"] if about["fp8"] else []
    text += [f"experts      {line}" for line in about["experts"]]
    for phase in about["batch"]:
        text.append(
            f"phase        {phase['phase']}: {human(phase['tokens'])} tokens, {phase['steps']:,} "
            f"steps of {phase['rows']} rows × {phase['seq_len']:,}; each rank "
            f"{phase['micro_batches']} × {phase['micro_batch_rows']} rows"
        )
    text += [f"held out     {_evaluated(*each)}" for each in (about["held_out"] or {}).items()]
    if model["couples_rows"]:
        text.append(f"micro-batch  {COUPLED.format(', '.join(model['couples_rows']))}")
    if any(group["match"] for group in about["groups"]):
        text += [f"group        {_group(group)}" for group in about["groups"]]
    text += [f"decay        {line}" for line in _decay(about["groups"])]
    text += [f"fp32         {line}" for line in _fp32(about["groups"])]
    if len(about["stages"]) > 1:
        text += [f"stage {stage['stage']:<7}{_stage(stage)}" for stage in about["stages"]]
        text += [f"pipeline     {_pipeline(phase)}" for phase in about["pipeline"]]
    where = " of the fullest stage" * (len(about["stages"]) > 1)
    training = _memory(about["memory_by_tensor_rank"], where)
    if about["scoring"] is None:
        text += [f"memory       {line}" for line in training]
    else:
        text.append(f"memory       {_highest(about)}")
        text += [f"training     {line}" for line in training]
        text.append(f"scores       {_scores(about['scoring'])}")
    text += [f"warning      {line}" for line in about["warnings"]]
    saved = about["checkpoints"]
    text.append(f"checkpoints  {saved['saved']} of {as_bytes(saved['bytes'])} each")
    return text


def _evaluated(name: str, source: dict[str, Any]) -> str:
    if "rows_of" in source:
        return f"{name}: {'none' if source['rows_of'] is None else 'as ' + source['rows_of']}"
    return f"{name}: {source['rows']} rows × {source['seq_len']:,} of {source['url']}"


def degrees(layout: dict[str, Any]) -> str:
    """Format the degrees of parallelism; experts only where they are split."""
    experts = f", ep {layout['ep']}" if layout["ep"] > 1 else ""
    return " × ".join(f"{name} {layout[name]}" for name in AXES) + experts


def _stage(stage: dict[str, Any]) -> str:
    layers = ", ".join(
        f"{first}" if first == last else f"{first}–{last}" for first, last in stage["layers"]
    )
    size = as_bytes(device_bytes(stage["memory"]))
    return f"layers {layers}: {stage['parameters']:,} parameters, {size} on each rank"


def _pipeline(phase: dict[str, Any]) -> str:
    return (
        f"{phase['phase']}: {phase['micro_batches']} micro-batches, {phase['bubble']:.1%} of a "
        f"step idle; {phase['messages']} messages, {as_bytes(phase['message_bytes'])} between "
        "stages for each data-parallel rank"
    )


def _group(group: dict[str, Any]) -> str:
    return (
        f"{group['match'] or 'all others'}: {group['parameters']:,} parameters, peak rate "
        f"{group['lr']:g}, decay {group['weight_decay']:g}, {', '.join(group['states'])}"
        if group["lr"]
        else f"{group['match']}: {group['parameters']:,} parameters, frozen"
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


def _fp32(groups: list[dict[str, Any]]) -> list[str]:
    """Return a line for the parameters that are fp32 beside weights of half precision."""
    own = [group for group in groups if group["full_precision"]]
    count = sum(group["parameters"] for group in own)
    names = sorted({name for group in own for name in group["names"]})
    return [f"{count:,} parameters: {', '.join(names)}"] if own else []


def _memory(by_rank: list[dict[str, int]], stage: str) -> list[str]:
    """Return a line for each tensor rank, or one line if all are equal."""
    alike = all(parts == by_rank[0] for parts in by_rank)
    text = []
    for rank, parts in enumerate(by_rank[:1] if alike else by_rank):
        where = "each rank" if alike else f"each rank of tensor rank {rank}"
        text.append(_bytes(parts, f"on {where}{stage}"))
    return text


def _highest(about: dict[str, Any]) -> str:
    """Return the memory of a rank that trains and scores in words."""
    when = "scores a checkpoint" if about["memory"] == about["scoring"]["memory"] else "trains"
    return f"{as_bytes(device_bytes(about['memory']))}: the highest, when a rank {when}"


def _scores(scoring: dict[str, Any]) -> str:
    where = "on each rank of the first machine, while it scores a checkpoint"
    caches = as_bytes(scoring["generation"])
    return f"{_bytes(scoring['memory'], where)}; tasks that generate hold {caches} more"


def _bytes(parts: dict[str, int], where: str) -> str:
    """Format the bytes of the parts on a device and on its host."""
    more = "" if "activations" in parts else ", and activations"
    named = {
        host: ", ".join(
            f"{part.removeprefix(HOST)} {as_bytes(size)}"
            for part, size in parts.items()
            if size and part.startswith(HOST) == host
        )
        for host in (False, True)
    }
    line = f"{as_bytes(device_bytes(parts))} {where} ({named[False]}){more}"
    if host := host_bytes(parts):
        line += f"; {as_bytes(host)} of host memory ({named[True]})"
    return line


def configuration(about: dict[str, Any]) -> str:
    """Format the resolved configuration with all defaults."""
    return f"configuration\n{textwrap.indent(reader.dump(about['configuration']), '  ')}"
