"""Explain why a rank ran out of memory: the part that exceeds the limit, and what to change.

Both come from the same accounting as the dry run's numbers.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...console.errors import LayoutError, RunError
from ...console.progress import format_bytes
from ...models.accounting.state import HOST
from ..layout.checks import problems
from ..loop.batches import micro_rows
from ..run.job import Job
from . import memory

if TYPE_CHECKING:
    import torch

ALLOCATOR = "DefaultCPUAllocator"
"""torch's allocator on the CPU; its RuntimeErrors begin with a line of torch's source."""
CGROUP = Path("/sys/fs/cgroup/memory.max")
MAX_CHANGES = 4
"""Maximum changes that an error proposes."""
ENGINE_CHANGES = (
    *(("zero", stage) for stage in (1, 2, 3)),
    ("gather", "block"),
    ("shard", None),
    ("offload_optimizer", "cpu"),
    ("offload", "cpu"),
)
"""Engine settings that may lower memory."""


@contextlib.contextmanager
def explain_out_of_memory(
    job: Job, rank: int, current_activity: Callable[[], str], device: torch.device
) -> Iterator[None]:
    """Turn an out-of-memory error into one that names the part that did not fit."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = str(error)
        traceback.clear_frames(error.__traceback__)  # they hold tensors
        limit = memory_limit(device)
        raise out_of_memory_error(job, rank, current_activity(), message, limit) from None


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and ALLOCATOR in str(error)


def memory_limit(device: torch.device) -> int:
    """Return the GPU's bytes, or the rank's share of this machine's memory."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if CGROUP.exists() and (cgroup_limit := CGROUP.read_text().strip()).isdecimal():
        limits.append(int(cgroup_limit))
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def out_of_memory_error(
    job: Job, rank: int, activity: str, torch_message: str, limit: int
) -> RunError:
    """Build the error for a rank that needs more than `limit` bytes."""
    stage = rank * job.run.layout.pp // job.processes
    sizes = count_memory(job, stage)
    parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in sizes.items() if size)
    lines = [
        *torch_message[max(0, torch_message.find(ALLOCATOR)) :].strip().splitlines()[:1],
        f"counted for this rank: {format_bytes(sum(sizes.values()))} ({parts})",
        f"it may use {format_bytes(limit)}: {verdict(sizes, limit)}",
    ]
    options = [
        f"{change} ({format_bytes(size)}{', fits' * (size <= limit)})"
        for change, size in cheaper_changes(job, stage, limit)[:MAX_CHANGES]
    ]
    return RunError(
        f"{job.run.layout.rank_name(rank, job.processes)} ran out of memory ({activity})",
        where="\n" + "\n".join(f"    {line}" for line in lines),
        hint=f"what would be counted: {'; '.join(options)}; or use more ranks"
        if options
        else "use more ranks (layout.cp or layout.tp), shorter rows, or a smaller model",
    )


def count_memory(job: Job, stage: int) -> dict[str, int]:
    """Count the bytes by part on the stage's fullest rank, at a step's peak. On a GPU, parts in
    host memory do not count."""
    host_is_separate = job.run.device == "cuda"
    sizes_by_rank = (
        {
            part: size
            for part, size in timeline.parts.items()
            if not (host_is_separate and part.startswith(HOST))
        }
        for timeline in memory.timelines(job, stage)
    )
    return max(sizes_by_rank, key=lambda sizes: sum(sizes.values()))


def verdict(sizes: dict[str, int], limit: int) -> str:
    """Name the part at which the running sum exceeds the limit."""
    total = 0
    for part, size in sizes.items():
        if total + size > limit:
            earlier = f" beside the {format_bytes(total)} of the parts before" if total else ""
            return f"{part} ({format_bytes(size)}) exceed it{earlier}"
        total += size
    return (
        "all of this fits; not counted are buffers of the network, fragments of free memory, and "
        "other programs"
    )


def cheaper_changes(job: Job, stage: int, limit: int) -> list[tuple[str, int]]:
    """Find overrides that lower the count, with their bytes, the lowest first."""
    current = sum(count_memory(job, stage).values())
    changes = [first_fitting(values, stage, limit) for values in alternatives(job)]
    return sorted([change for change in changes if change[1] < current], key=lambda pair: pair[1])


def first_fitting(values: list[tuple[str, Job]], stage: int, limit: int) -> tuple[str, int]:
    """Return the first override with which a rank fits, or the last override, and the bytes."""
    result = "", 0
    for change, job in values:
        result = change, sum(count_memory(job, stage).values())
        if result[1] <= limit:
            break
    return result


def alternatives(job: Job) -> Iterator[list[tuple[str, Job]]]:
    """Yield, by setting, the values to try in turn: an override, and the job with it."""
    run = job.run

    def changed(**settings: Any) -> Job:
        return replace(job, run=replace(run, **settings))

    if sizes := list(smaller_micro_batches(job)):
        yield [(f"micro_batch_tokens={n}", changed(micro_batch_tokens=n)) for n in sizes]
    if run.recompute != "block":
        yield [("recompute=block", changed(recompute="block"))]
    engine_keys = {field.name for field in fields(run.engine)}
    for key, value in ENGINE_CHANGES:
        if key in engine_keys and getattr(run.engine, key) != value:
            with contextlib.suppress(LayoutError, ValueError):  # further settings may exclude it
                engine = replace(run.engine, **{key: value})  # type: ignore[arg-type]
                engine.check(run.layout, job.processes, job.precision)
                yield [(f"engine.{key}={value}".lower(), changed(engine=engine))]
    layout = replace(run.layout, cp=2 * run.layout.cp)
    lengths = [phase.seq_len for phase in job.plan.phases]
    if not any(problems(layout, job.processes, job.model, lengths)):
        yield [(f"layout.cp={layout.cp}", changed(layout=layout))]


def smaller_micro_batches(job: Job) -> Iterator[int]:
    """Yield micro_batch_tokens halved again and again, down to micro-batches with a single row."""
    tokens, cp = job.run.micro_batch_tokens, job.run.layout.cp

    def max_rows(tokens: int) -> int:
        return max(micro_rows(tokens, phase, job.dp, cp) for phase in job.plan.phases)

    while tokens > 1 and max_rows(tokens) > 1:
        tokens //= 2
        yield tokens
