"""A layout plan beside the job that is to run it."""

from __future__ import annotations

from collections.abc import Iterator

from ...console.errors import LayoutError
from .job import Job
from .layout_plan import LayoutPlan, check_layers, model_hash


def check_plan(plan: LayoutPlan, job: Job, file: str) -> None:
    """Raise unless the plan was made for this model, these ranks and these batches."""
    different = list(differences(plan, job))
    if different:
        raise LayoutError(
            f"{file} was planned for another run",
            where="\n" + "\n".join(f"    {line}" for line in different),
            hint="run `trainer plan` again for this run",
        )
    check_layers(plan, len(job.model.layers), file)


def differences(plan: LayoutPlan, job: Job) -> Iterator[str]:
    planned = plan.planned
    own = model_hash(job.model)
    if planned.model != own:
        yield f"model: the plan has {planned.model}, the run {own}"
    if planned.gpus != job.processes:
        yield f"processes: the plan has {planned.gpus}, the run {job.processes}"
    known = {(phase.seq_len, phase.batch_tokens) for phase in planned.phases}
    for phase in job.plan.phases:
        here = phase.seq_len, phase.seq_len * phase.batch_rows
        if here not in known:
            shown = "; ".join(f"{length:,} × {size:,}" for length, size in sorted(known))
            yield (
                f"phase {phase.name}: {here[0]:,} tokens a row × {here[1]:,} a step, and the plan "
                f"has {shown}"
            )


def prediction(job: Job) -> LayoutPlan | None:
    """Return the plan whose layout the job runs; None if it has no plan, or overrides changed the
    run since."""
    plan, run = job.layout_plan, job.run
    if plan is None or any(differences(plan, job)):
        return None
    same = (
        plan.layout == run.layout
        and plan.engine_of_layers == run.engine
        and plan.micro_batch_tokens == run.micro_batch_tokens
        and plan.rules == job.rules
    )
    return plan if same else None
