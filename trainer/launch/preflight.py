"""Preflight checks: everything that can be known to fail is reported before a run starts.

Nothing here writes. Checks of a single configuration happen when it is read; `resolve` checks that
a folder holds this run and no other.
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
from ..record import loggers
from ..run.job import Job
from ..weights import source as origins

DISK_RESERVE = 1 << 20


def check(job: Job, *, elsewhere: bool = False) -> None:
    """Raise all errors that are known before the first step, here or on other machines."""
    checks = [_engine, _layout, _vocabulary, _groups, _weights, _held_out]
    checks += [_devices, _loggers] * (not elsewhere)
    run_all(
        *(partial(check, job) for check in checks),
        *(partial(_rows, job, phase) for phase in job.plan.phases),
    )


def check_disk(job: Job) -> None:
    """Raise if the folder is not writable, or if one more checkpoint does not fit on the disk."""
    need = checkpoint_bytes(job) + DISK_RESERVE
    root = job.folder.root.absolute()
    there = next(path for path in (root, *root.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise StorageError(
            f"cannot write to the run's folder {job.folder.root}: {there} "
            + ("is not writable" if there.is_dir() else "is not a folder"),
            hint="choose another --out, or fix its permissions",
        )
    free = shutil.disk_usage(there).free
    if need > free:
        raise StorageError(
            f"{job.folder.root} has {as_bytes(free)} free, and one checkpoint takes "
            f"{as_bytes(need)}",
            hint="free some space, or choose another --out",
        )


def _engine(job: Job) -> None:
    """Raise if the engine does not support the layout."""
    job.run.engine.check(job.run.layout, job.processes, job.precision)


def _layout(job: Job) -> None:
    """Raise if the layout does not shard the model and its rows."""
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


def _groups(job: Job) -> None:
    """Raise if a pattern of optimizer.groups matches no parameter."""
    from ...models.accounting.count import build_meta
    from ..engines.groups import parameter_groups

    parameter_groups(build_meta(job.model), job.run.optimizer)


def _rows(job: Job, phase: PhaseRows) -> None:
    """Raise if rows exceed the table of positions, or if a data-parallel rank has no row."""
    table = job.model.learned_positions
    if table is not None and phase.seq_len > table:
        raise PlanError(
            f"phase {phase.name} has rows of {phase.seq_len:,} tokens, and the model's "
            f"position table (learned_positions) has {table:,}",
            hint=f"use rows of at most {table} tokens, or model.learned_positions={phase.seq_len}",
        )
    if phase.batch_rows < job.dp:
        raise LayoutError(
            f"phase {phase.name} has {phase.batch_rows} rows in a step, fewer than the {job.dp} "
            "data-parallel ranks",
            hint=f"use at most processes={phase.batch_rows}, or a larger batch",
        )


def _weights(job: Job) -> None:
    """Raise unless the initial weights are named once and fit the model."""
    source = job.run.init_from
    if job.parent is not None and source is not None:
        raise RunError(
            "the mixture continues a run (`after`) and takes its weights, and init_from names "
            "other weights",
            hint="remove one of them",
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
            f"{job.processes} processes need {job.processes} GPUs; this machine has {count_gpus()}",
            hint=f"use processes={count_gpus()}",
        )


def _loggers(job: Job) -> None:
    loggers.check_installed(job.run.watch)
