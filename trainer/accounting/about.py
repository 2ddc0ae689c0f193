"""Facts of a run that torch counts, kept in its folder: `about.json`.

Each start writes them, so that a report needs no torch, which takes more memory than the report. If
the file is lost or damaged, the next reader counts and writes them again.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from ...console.errors import IntegrityError
from ...console.progress import human
from ...dataplane.storage import storage
from ...dataplane.storage.sealed import sealed, unsealed
from ..folders.folder import RunFolder

if TYPE_CHECKING:
    from ..layout.simulate import Timeline
    from ..run.job import Job

MOST_ROUNDS = 4
"""Most micro-batches for each stage whose passes are kept."""


def save(job: Job) -> dict[str, Any]:
    """Write the facts of a job into its folder, and return them."""
    found = facts(job)
    storage.write(str(job.folder.about), sealed(found))
    return found


def of_run(folder: RunFolder) -> dict[str, Any]:
    """Return the facts of a stored run."""
    with contextlib.suppress(FileNotFoundError, IntegrityError):  # damaged: it is counted again
        return unsealed(str(folder.about), folder.about.read_bytes(), hint="")
    from ..run.stored import read_run

    job = read_run(folder)
    return save(job) if os.access(folder.root, os.W_OK) else facts(job)


def facts(job: Job) -> dict[str, Any]:
    from ...models.accounting.show import shown_active
    from . import describe, memory

    counts = memory.parameters(job)
    layers = [layer.mixer for layer in job.model.layers]
    active = shown_active(counts["parameters"], counts["active_parameters"])
    return {
        "model": {
            **counts,
            "layers": layers,
            "note": f"{human(counts['parameters'])} parameters{active} in {len(layers)} layers",
            "pattern": job.model.pattern,
            "width": job.model.width,
            "vocab_size": job.model.vocab_size,
        },
        "layout": {**job.layout, "degrees": describe.degrees(job.layout)},
        "fp8": describe.fp8(job),
        "optimizer": job.run.optimizer.describe(),
        "lr": job.run.optimizer.lr,
        "held_out": job.held_out.name if job.run.evaluate is not None else None,
        "schedule": _schedule(job) if job.run.layout.pp > 1 else None,
    }


def _schedule(job: Job) -> dict[str, Any]:
    """Return the passes of the first phase's step, simulated."""
    from .stages import pipelines, timeline

    first = pipelines(job)[0]
    number = min(first["micro_batches"], MOST_ROUNDS * job.run.layout.pp)
    simulated = timeline(job, number, job.plan.phases[0].seq_len)
    return {
        "name": job.run.layout.schedule,
        "micro_batches": first["micro_batches"],
        "drawn": number,
        "bubble": first["bubble"],
        "stages": [
            [[action.kind, action.chunk, action.micro, start, end] for action, start, end in stage]
            for stage in simulated.spans
        ],
    }


def timeline_of(schedule: dict[str, Any]) -> Timeline:
    """Return the simulated step of stored facts."""
    from ..layout.schedules import Action
    from ..layout.simulate import Span, Timeline

    return Timeline(
        [
            [Span(Action(kind, chunk, micro), start, end) for kind, chunk, micro, start, end in own]
            for own in schedule["stages"]
        ]
    )
