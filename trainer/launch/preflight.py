"""What is refused before anything starts: everything that can be known to fail by then.

Nothing here writes. What the configuration says by itself has been checked when it was read, and
that a folder holds this run and no other when it was resolved.
"""

from __future__ import annotations

import os
import shutil
from functools import partial

from ...console.errors import LayoutError, PlanError, RunError, StorageError, run_all
from ...console.progress import as_bytes
from ...dataplane.order.timeline import PhaseRows
from ..cluster.ranks import joined
from ..costs.memory import checkpoint_bytes
from ..layout import checks as layout_checks
from ..loop import evaluate
from ..run.run import Job
from ..weights import source as origins

DISK_RESERVE = 1 << 20


def check(job: Job, *, elsewhere: bool = False) -> None:
    """Everything that can be known to fail before the first step, here or on other machines."""
    checks = [_layout, _vocabulary, _weights, _held_out, *[_devices] * (not elsewhere)]
    run_all(
        *(partial(check, job) for check in checks),
        *(partial(_rows, job, phase) for phase in job.plan.phases),
    )


def check_disk(job: Job) -> None:
    """The folder can be written to, and a checkpoint fits beside the ones that are kept."""
    need = checkpoint_bytes(job) + DISK_RESERVE
    root = job.folder.root.absolute()
    there = next(path for path in (root, *root.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise StorageError(
            f"cannot write to the run's folder {job.folder.root}: {there} "
            + ("may not be written to" if there.is_dir() else "is no folder"),
            hint="choose another --out, or fix its permissions",
        )
    free = shutil.disk_usage(there).free
    if need > free:
        raise StorageError(
            f"{job.folder.root} has {as_bytes(free)} free, and one checkpoint takes "
            f"{as_bytes(need)}",
            hint="free some space, or choose another --out",
        )


def _layout(job: Job) -> None:
    """What the engine cannot do, and what cannot be divided."""
    job.run.engine.check(job.run.layout, job.processes, job.precision)
    lengths = [phase.seq_len for phase in job.plan.phases]
    if job.run.evaluate is not None and job.run.evaluate.seq_len is not None:
        lengths.append(job.run.evaluate.seq_len)
    layout_checks.check(job.run.layout, job.processes, job.model, lengths)


def _vocabulary(job: Job) -> None:
    if job.plan.vocab_size > job.model.vocab_size:
        raise PlanError(
            f"the mixture's tokenizer has {job.plan.vocab_size:,} ids, the model embeds "
            f"{job.model.vocab_size:,}",
            hint=f"override model.vocab_size={job.plan.vocab_size}, or take another model",
        )


def _rows(job: Job, phase: PhaseRows) -> None:
    """Rows that the model has positions for, and at least one for each process."""
    table = job.model.learned_positions
    if table is not None and phase.seq_len > table:
        raise PlanError(
            f"phase {phase.name} has rows of {phase.seq_len:,} tokens, and the model's table "
            f"of positions (learned_positions) has {table:,}",
            hint=f"use rows of {table} tokens at most, or model.learned_positions={phase.seq_len}",
        )
    if phase.batch_rows < job.dp:
        raise LayoutError(
            f"phase {phase.name} updates on {phase.batch_rows} rows, fewer than the {job.dp} "
            "data-parallel processes",
            hint=f"use processes={phase.batch_rows} at most, or a larger batch",
        )


def _weights(job: Job) -> None:
    """Those to begin with are named once, and are of this model."""
    source = job.run.init_from
    if job.parent is not None and source is not None:
        raise RunError(
            "the mixture continues a run (`after`), whose weights it takes, and init_from names "
            "others",
            hint="leave out one of them",
        )
    origin = None if job.folder.begun else job.origin()
    if origin is not None:
        origins.check(origin, job.model, moments=source is not None and source.moments)


def _held_out(job: Job) -> None:
    if job.run.evaluate is not None and not job.held_out.exists():
        evaluate.plan_of(job.run.evaluate, job.plan)


def _devices(job: Job) -> None:
    from ..layout.devices import count_gpus

    if job.run.device == "cuda" and job.processes > count_gpus() and not joined():
        raise LayoutError(
            f"{job.processes} processes for {count_gpus()} GPUs",
            hint=f"use processes={count_gpus()}",
        )
