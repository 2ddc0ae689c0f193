"""Store facts about a run that need torch to count, in its folder as `about.json`.

Every start writes them, so that a report needs no torch, whose import takes more memory than the
report. If the file is lost or damaged, the next reader counts the facts and writes them again.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from ...console.errors import IntegrityError
from ...console.progress import exact_count, format_number
from ...dataplane.storage import storage
from ...dataplane.storage.sealed import seal, unseal
from ..folders.folder import RunFolder

if TYPE_CHECKING:
    from ..layout.simulate import StepTimeline
    from ..run.job import Job

MAX_ROUNDS = 4
"""Maximum micro-batches per stage whose passes are stored."""


def save_facts(job: Job) -> dict[str, Any]:
    """Count a job's facts, write them into its folder, and return them."""
    facts = count_facts(job)
    storage.write(str(job.folder.about), seal(facts))
    return facts


def load_facts(folder: RunFolder) -> dict[str, Any]:
    """Return a stored run's facts; count them if the file is lost or damaged."""
    with contextlib.suppress(FileNotFoundError, IntegrityError):
        return unseal(str(folder.about), folder.about.read_bytes(), hint="")
    from ..run.stored import read_run

    job = read_run(folder)
    return save_facts(job) if os.access(folder.root, os.W_OK) else count_facts(job)


def count_facts(job: Job) -> dict[str, Any]:
    from ...models.accounting.show import format_active
    from . import describe, memory

    counts = memory.parameters(job)
    layers = ["|".join(layer.mixers) for layer in job.model.layers]
    active = format_active(counts["parameters"], counts["active_parameters"])
    return {
        "model": {
            **counts,
            "layers": layers,
            "note": f"{format_number(counts['parameters'])} parameters{active} in "
            f"{exact_count(len(layers), 'layers')}",
            "pattern": job.model.pattern,
            "width": job.model.width,
            "vocab_size": job.model.vocab_size,
        },
        "layout": {**job.layout, "degrees": describe.degrees(job.layout)},
        "fp8": describe.fp8_share(job),
        "optimizer": job.run.optimizer.describe(),
        "lr": job.run.optimizer.lr,
        "held_out": job.held_out.name if job.run.evaluate is not None else None,
        "schedule": _schedule(job) if job.run.layout.pp > 1 else None,
    }


def _schedule(job: Job) -> dict[str, Any]:
    """Simulate the passes in a step of the first phase."""
    from .stages import describe_pipelines, simulate_step

    first = describe_pipelines(job)[0]
    num_drawn = min(first["micro_batches"], MAX_ROUNDS * job.run.layout.pp)
    timeline = simulate_step(job, num_drawn, job.plan.phases[0].seq_len)
    return {
        "name": job.run.layout.schedule,
        "micro_batches": first["micro_batches"],
        "drawn": num_drawn,
        "bubble": first["bubble"],
        "stages": [
            [[action.kind, action.chunk, action.micro, start, end] for action, start, end in stage]
            for stage in timeline.spans
        ],
    }


def restore_timeline(schedule: dict[str, Any]) -> StepTimeline:
    """Rebuild the simulated step from its stored facts."""
    from ..layout.schedules import StageAction
    from ..layout.simulate import ActionSpan, StepTimeline

    return StepTimeline(
        [
            [
                ActionSpan(StageAction(kind, chunk, micro), start, end)
                for kind, chunk, micro, start, end in passes
            ]
            for passes in schedule["stages"]
        ]
    )
