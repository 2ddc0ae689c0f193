"""Describe a run before it starts, for `--dry-run`, the terminal and the report."""

from __future__ import annotations

import textwrap
from typing import Any

from ...console import config as yaml_config
from ...console.progress import format_bytes, format_number
from ...dataplane.order.row_lengths import split_by_length
from ...models.accounting.show import choose_letters, format_active
from ...models.accounting.state import HOST, device_bytes, host_bytes
from ...models.accounting.stored import load_or_compute
from ..loop.evaluate import missing_note, plan_held_out, unnamed_sources
from ..run.config import COUPLED
from ..run.job import Job
from . import memory
from . import stages as pipeline

AXES = ("pp", "dp", "tp", "cp")
UNCOUNTED = ("seed", "init_from", "synthetic", "data", "evaluate", "checkpoints", "slurm")
"""Keys in run.yaml that change no count; rows are counted by phase."""


def describe(job: Job, *, activations: bool = False) -> dict[str, Any]:
    """Return the description as `--json` prints it. `activations` counts memory over a step, which
    takes a second or two, instead of the state alone."""
    counts, held_out = load_counts(job, activations=activations), held_out_rows(job)
    scoring = counts["scoring"]
    scoring_memory = [scoring["memory"]] if scoring is not None else []
    return {
        "run": str(job.folder.root),
        "begun": job.folder.begun,
        "model": {
            "stripe": stripe(job),
            **memory.parameters(job),
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
        "experts": expert_lines(job),
        "groups": memory.groups(job),
        "batch": memory.batches(job),
        "memory": max([*counts["memory"], *scoring_memory], key=device_bytes),
        "memory_by_tensor_rank": counts["memory"],
        "scoring": scoring,
        "stages": counts["stages"],
        "pipeline": counts["pipeline"],
        "held_out": held_out,
        "warnings": [*counts["warnings"], *held_out_warnings(job, held_out or {})],
        "checkpoints": {"bytes": memory.checkpoint_bytes(job), "saved": memory.checkpoints(job)},
        "configuration": yaml_config.plain(job.run),
    }


def load_counts(job: Job, *, activations: bool) -> dict[str, Any]:
    """Return the counts that need a built or traced model. They are stored: a second dry run needs
    no torch."""

    def count() -> dict[str, Any]:
        stages = pipeline.describe_stages(job)
        memory_by_stage = [
            [timeline.parts for timeline in memory.timelines(job, stage)]
            if activations
            else memory.state_memory(job, stage)
            for stage in range(len(stages))
        ]
        for stage, memory_by_rank in zip(stages, memory_by_stage, strict=True):
            stage["memory"] = max(memory_by_rank, key=device_bytes)
        return {
            "stages": stages,
            "memory": max(memory_by_stage, key=lambda ranks: max(map(device_bytes, ranks))),
            "scoring": count_scoring(job, activations=activations),
            "fp8": fp8_share(job),
            "pipeline": pipeline.describe_pipelines(job) if job.run.layout.pp > 1 else [],
            "warnings": [
                *pipeline.warnings(job),
                *eager_operators(job),
                *emulation_warnings(job),
            ],
        }

    run = {key: value for key, value in yaml_config.plain(job.run).items() if key not in UNCOUNTED}
    run["optimizer"] = {key: value for key, value in run["optimizer"].items() if key != "lr"}
    phases = [(phase.name, phase.seq_len, phase.batch_rows) for phase in split_by_length(job.plan)]
    question = f"described {activations} {job.model!r} {run} {phases} {job.layout}"
    return load_or_compute(question, count, source=memory.TRAINER)


def count_scoring(job: Job, *, activations: bool) -> dict[str, Any] | None:
    """Count the bytes on a rank that scores a checkpoint, and in the caches of generating tasks;
    None if the run scores no checkpoint."""
    if job.run.scores is None:
        return None
    return {
        "memory": memory.scoring_memory(job, activations=activations),
        "generation": memory.generation_caches(job),
    }


def held_out_rows(job: Job) -> dict[str, dict[str, Any]] | None:
    """Return the held-out dataset and rows by source, or None if the run evaluates nothing.

    A source without rows has `rows_of` instead: the source whose rows serve for both, or None.
    """
    from ...dataplane.order.plan import Plan

    if job.run.evaluate is None:
        return None
    is_stored = job.held_out.exists()
    plan = Plan.load(job.held_out) if is_stored else plan_held_out(job.run.evaluate, job.plan)
    rows: dict[str, dict[str, Any]] = {
        source.name: {"url": source.url, "rows": phase.rows, "seq_len": phase.seq_len}
        for source, phase in zip(plan.sources, plan.phases, strict=True)
    }
    urls = {source: entry["url"] for source, entry in rows.items()}
    owners = unnamed_sources(job.run.evaluate, job.plan, urls)
    return {**rows, **{source: {"rows_of": owner} for source, owner in owners.items()}}


def held_out_warnings(job: Job, held_out: dict[str, dict[str, Any]]) -> list[str]:
    """Return a warning that names the sources without held-out rows."""
    missing = [source for source, entry in held_out.items() if entry.get("rows_of", source) is None]
    return [missing_note(missing, job.run.evaluate.split)] if missing and job.run.evaluate else []


def expert_lines(job: Job) -> list[str]:
    """Return a line for each operator whose experts are split over ranks."""
    ep, ranks = job.run.layout.ep, job.processes // job.run.layout.pp
    if ep == 1:
        return []
    counts = {operator: options.expert_count for operator, options in job.model.operators.items()}
    return [
        f"{operator}: {count // ep} of {count} on each rank, {ranks // ep} replicas of each expert"
        for operator, count in counts.items()
        if count is not None
    ]


def fp8_share(job: Job) -> str:
    """Describe the share of FLOPs in FP8; empty for all further precisions."""
    from ...models.accounting.count import build_meta
    from ...models.transforms.fp8 import summary

    if job.precision.fp8 is None:
        return ""
    shares = summary(build_meta(job.model), job.precision.fp8)
    return (
        f"{shares['share']:.1%} of the FLOPs of matrices; in training, where gradients of weights "
        f"stay in bf16, {shares['training_share']:.1%}"
    )


def emulation_warnings(job: Job) -> list[str]:
    """Return a warning if the device has no units for FP8."""
    if job.precision.fp8 is None or job.run.device == "cuda":
        return []
    return [
        "the CPU emulates FP8: values are rounded as on a GPU, and products are slower than bf16"
    ]


def eager_operators(job: Job) -> list[str]:
    """Return a line for each operator that stays outside the graphs of torch.compile."""
    if not job.run.engine.compile:
        return []
    import torch

    from ...models.accounting.count import build_meta
    from ...models.parallel.axes import Axes, Axis
    from ...models.transforms.compilation import find_eager_operators

    layout = job.run.layout
    axes = Axes(
        context=Axis(None, 0, layout.cp),
        experts=Axis(None, 0, layout.ep),
        **layout.row_forms,
    )
    reasons = find_eager_operators(build_meta(job.model), axes, torch.device(job.run.device))
    return [
        f"engine.compile: `{operator}` runs eagerly: {reason}"
        for operator, reason in reasons.items()
    ]


def stripe(job: Job) -> str:
    """Return a letter for each layer, as in `headrace models show`: `[SMLAT]`."""
    kinds = [str(layer) for layer in job.model.layers]
    letters = choose_letters(kinds)
    return f"[{''.join(letters[kind] for kind in kinds)}]"


def lines(about: dict[str, Any]) -> list[str]:
    """Format the description for a person."""
    model, plan, layout = about["model"], about["plan"], about["layout"]
    formatted = [
        f"run          {about['run']}{' (resumes)' if about['begun'] else ''}",
        f"model        {model['stripe']}  {model['parameters']:,} parameters"
        f"{format_active(model['parameters'], model['active_parameters'])}, vocabulary "
        f"{model['vocab_size']:,}",
        f"plan         {plan['hash']}: {format_number(plan['tokens'])} tokens, "
        f"{plan['steps']:,} steps, sources {', '.join(plan['sources'])}",
        f"layout       {layout['engine']}, {layout['processes']} × {layout['device']} = "
        f"{degrees(layout)}, {layout['precision']}",
    ]
    formatted += [f"fp8          {about['fp8']}"] if about["fp8"] else []
    formatted += [f"experts      {line}" for line in about["experts"]]
    for phase in about["batch"]:
        formatted.append(
            f"phase        {phase['phase']}: {format_number(phase['tokens'])} tokens, "
            f"{phase['steps']:,} steps of {phase['rows']} rows × {phase['seq_len']:,}; each rank "
            f"{phase['micro_batches']} × {phase['micro_batch_rows']} rows"
        )
    held_out = about["held_out"] or {}
    formatted += [f"held out     {_held_out(source, rows)}" for source, rows in held_out.items()]
    if model["couples_rows"]:
        formatted.append(f"micro-batch  {COUPLED.format(', '.join(model['couples_rows']))}")
    if any(group["match"] for group in about["groups"]):
        formatted += [f"group        {_group(group)}" for group in about["groups"]]
    formatted += [f"decay        {line}" for line in _decay(about["groups"])]
    formatted += [f"fp32         {line}" for line in _fp32(about["groups"])]
    if len(about["stages"]) > 1:
        formatted += [f"stage {stage['stage']:<7}{_stage(stage)}" for stage in about["stages"]]
        formatted += [f"pipeline     {_pipeline(phase)}" for phase in about["pipeline"]]
    stage = " of the fullest stage" * (len(about["stages"]) > 1)
    training = _memory(about["memory_by_tensor_rank"], stage)
    if about["scoring"] is None:
        formatted += [f"memory       {line}" for line in training]
    else:
        formatted.append(f"memory       {_highest(about)}")
        formatted += [f"training     {line}" for line in training]
        formatted.append(f"scores       {_scores(about['scoring'])}")
    formatted += [f"warning      {line}" for line in about["warnings"]]
    saved = about["checkpoints"]
    formatted.append(f"checkpoints  {saved['saved']} of {format_bytes(saved['bytes'])} each")
    return formatted


def _held_out(source: str, rows: dict[str, Any]) -> str:
    if "rows_of" in rows:
        return f"{source}: {'none' if rows['rows_of'] is None else 'as ' + rows['rows_of']}"
    return f"{source}: {rows['rows']} rows × {rows['seq_len']:,} of {rows['url']}"


def degrees(layout: dict[str, Any]) -> str:
    """Format the degrees of parallelism; experts only where they are split."""
    experts = f", ep {layout['ep']}" if layout["ep"] > 1 else ""
    return " × ".join(f"{axis} {layout[axis]}" for axis in AXES) + experts


def _stage(stage: dict[str, Any]) -> str:
    layers = ", ".join(
        f"{first}" if first == last else f"{first}–{last}" for first, last in stage["layers"]
    )
    size = format_bytes(device_bytes(stage["memory"]))
    return f"layers {layers}: {stage['parameters']:,} parameters, {size} on each rank"


def _pipeline(phase: dict[str, Any]) -> str:
    return (
        f"{phase['phase']}: {phase['micro_batches']} micro-batches, {phase['bubble']:.1%} of a "
        f"step idle; {phase['messages']} messages, {format_bytes(phase['message_bytes'])} between "
        "stages for each data-parallel rank"
    )


def _group(group: dict[str, Any]) -> str:
    return (
        f"{group['match'] or 'all others'}: {group['parameters']:,} parameters, peak rate "
        f"{group['lr']:g}, decay {group['weight_decay']:g}, {', '.join(group['states'])}"
        if group["lr"]
        else f"{group['match'] or ', '.join(group['names'])}: {group['parameters']:,} parameters, "
        f"{'frozen' if group['match'] else 'moved by the loads of the experts'}"
    )


def _decay(groups: list[dict[str, Any]]) -> list[str]:
    """Return a line for each weight decay, with its parameters as name patterns."""
    decays = sorted({group["weight_decay"] for group in groups}, reverse=True)
    decay_lines = []
    for decay in decays:
        decay_groups = [group for group in groups if group["weight_decay"] == decay]
        value = f"{decay:g}" if decay else "none"
        decay_lines.append(f"{value}: {_parameters(decay_groups)}")
    return decay_lines


def _fp32(groups: list[dict[str, Any]]) -> list[str]:
    """Return a line for the parameters that stay fp32 in a model of half precision."""
    fp32_groups = [group for group in groups if group["full_precision"]]
    return [_parameters(fp32_groups)] if fp32_groups else []


def _parameters(groups: list[dict[str, Any]]) -> str:
    count = sum(group["parameters"] for group in groups)
    names = sorted({name for group in groups for name in group["names"]})
    return f"{count:,} parameters: {', '.join(names)}"


def _memory(memory_by_rank: list[dict[str, int]], stage: str) -> list[str]:
    """Return a line for each tensor rank, or a single line if all are equal."""
    first = memory_by_rank[0]
    if all(sizes == first for sizes in memory_by_rank):
        return [_bytes(first, f"on each rank{stage}")]
    return [
        _bytes(sizes, f"on each rank of tensor rank {rank}{stage}")
        for rank, sizes in enumerate(memory_by_rank)
    ]


def _highest(about: dict[str, Any]) -> str:
    """Return the higher of a rank's memory in training and in scoring."""
    when = "scores a checkpoint" if about["memory"] == about["scoring"]["memory"] else "trains"
    return f"{format_bytes(device_bytes(about['memory']))}: the highest, when a rank {when}"


def _scores(scoring: dict[str, Any]) -> str:
    ranks = "on each rank of the first machine, while it scores a checkpoint"
    caches = format_bytes(scoring["generation"])
    return f"{_bytes(scoring['memory'], ranks)}; tasks that generate hold {caches} more"


def _bytes(sizes: dict[str, int], ranks: str) -> str:
    """Format the bytes by part, on the device and on its host; `ranks` says who holds them."""
    uncounted = "" if "activations" in sizes else ", and activations"
    device_parts, host_parts = (
        ", ".join(
            f"{part.removeprefix(HOST)} {format_bytes(size)}"
            for part, size in sizes.items()
            if size and part.startswith(HOST) == on_host
        )
        for on_host in (False, True)
    )
    line = f"{format_bytes(device_bytes(sizes))} {ranks} ({device_parts}){uncounted}"
    if host := host_bytes(sizes):
        line += f"; {format_bytes(host)} of host memory ({host_parts})"
    return line


def configuration(about: dict[str, Any]) -> str:
    """Format the resolved configuration with all defaults."""
    return f"configuration\n{textwrap.indent(yaml_config.dump(about['configuration']), '  ')}"
