"""Compare a layout plan with the job that will run it."""

from __future__ import annotations

from collections.abc import Iterator

from ...console.errors import LayoutError
from ...dataplane.order.row_lengths import split_by_length
from .job import Job
from .layout_plan import LayoutPlan, check_values, model_hash


def check_plan(plan: LayoutPlan, job: Job, file: str) -> None:
    """Raise unless the plan was made for this model, run, ranks and batches."""
    differences = list(find_differences(plan, job))
    if differences:
        raise LayoutError(
            f"{file} was planned for another run",
            where="\n" + "\n".join(f"    {line}" for line in differences),
            hint="run `trainer plan` again for this run",
        )
    check_values(plan, len(job.model.layers), file)


def find_differences(plan: LayoutPlan, job: Job) -> Iterator[str]:
    """Yield a line for each difference in model, ranks, precision, optimizer, device, batches."""
    planned = plan.planned
    job_model = model_hash(job.model)
    if planned.model != job_model:
        yield f"model: the plan has {planned.model}, the run {job_model}"
    if planned.gpus != job.processes:
        yield f"processes: the plan has {planned.gpus}, the run {job.processes}"
    run = job.run
    for name, ours in (
        ("precision", job.precision.name),
        ("optimizer", run.optimizer.kind),
        ("device", run.device),
    ):
        theirs = getattr(planned, name)
        if theirs not in (None, ours):
            yield f"{name}: the plan has {theirs}, the run {ours}"
    batches = {(phase.seq_len, phase.batch_tokens) for phase in planned.phases}
    for phase in split_by_length(job.plan):
        batch_tokens = phase.seq_len * phase.batch_rows
        if (phase.seq_len, batch_tokens) not in batches:
            shown = "; ".join(f"{length:,} × {size:,}" for length, size in sorted(batches))
            yield (
                f"phase {phase.name}: {phase.seq_len:,} tokens a row × {batch_tokens:,} a step, "
                f"and the plan has {shown}"
            )


def followed_plan(job: Job) -> LayoutPlan | None:
    """Return the plan whose layout the job runs; None without a plan, or if overrides have changed
    the run since."""
    plan, run = job.layout_plan, job.run
    if plan is None or any(find_differences(plan, job)):
        return None
    unchanged = (
        plan.layout == run.layout
        and plan.resolved_engine == run.engine
        and plan.micro_batch_tokens == run.micro_batch_tokens
        and plan.rules == job.rules
    )
    return plan if unchanged else None
