"""Error of a rank that runs out of memory: the part of the accounting that does not fit, and what
to change, with the numbers of the same accounting."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...console.errors import LayoutError, RunError
from ...console.progress import as_bytes
from ...models.accounting.state import HOST
from ..layout.checks import problems
from ..loop.batches import micro_rows
from ..run.job import Job
from . import memory as costs

if TYPE_CHECKING:
    import torch

ALLOCATOR = "DefaultCPUAllocator"
"""torch's allocator on the CPU; its errors are RuntimeErrors that begin with the place in torch."""
CGROUP = Path("/sys/fs/cgroup/memory.max")
SHOWN = 4
"""Most changes that an error proposes."""
ENGINE_CHANGES = (
    *(("zero", stage) for stage in (1, 2, 3)),
    ("gather", "block"),
    ("shard", None),
    ("offload_optimizer", "cpu"),
    ("offload", "cpu"),
)
"""Settings of engines that may hold less."""


@contextlib.contextmanager
def explained(
    job: Job, rank: int, doing: Callable[[], str], device: torch.device
) -> Iterator[None]:
    """Turn an out-of-memory error into one that says what did not fit; `doing` returns the part of
    the run."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = str(error)
        traceback.clear_frames(error.__traceback__)  # they hold tensors
        raise out_of_memory(job, rank, doing(), said, memory_limit(device)) from None


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and ALLOCATOR in str(error)


def memory_limit(device: torch.device) -> int:
    """Return the bytes of the GPU, or of the rank's part of this machine's memory."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if CGROUP.exists() and (text := CGROUP.read_text().strip()).isdecimal():
        found.append(int(text))
    return min(found) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def out_of_memory(job: Job, rank: int, doing: str, said: str, limit: int) -> RunError:
    """Return the error of a rank that asked for more than its `limit`."""
    stage = rank * job.run.layout.pp // job.processes
    parts = counted(job, stage)
    named = ", ".join(f"{part} {as_bytes(size)}" for part, size in parts.items() if size)
    total = sum(parts.values())
    lines = [
        *said[max(0, said.find(ALLOCATOR)) :].strip().splitlines()[:1],
        f"counted for this rank: {as_bytes(total)} ({named})",
        f"it may use {as_bytes(limit)}: {verdict(parts, limit)}",
    ]
    options = [
        f"{words} ({as_bytes(size)}{', fits' * (size <= limit)})"
        for words, size in changes(job, stage, limit)[:SHOWN]
    ]
    return RunError(
        f"{job.run.layout.rank_name(rank, job.processes)} ran out of memory ({doing})",
        where="\n" + "\n".join(f"    {line}" for line in lines),
        hint=f"what would be counted: {'; '.join(options)}; or use more ranks"
        if options
        else "use more ranks (layout.cp or layout.tp), shorter rows, or a smaller model",
    )


def counted(job: Job, stage: int) -> dict[str, int]:
    """Return the bytes of each part on the fullest rank of a stage, at the highest moment of a
    step. A GPU does not hold what lies in host memory."""
    apart = job.run.device == "cuda"
    every = (
        {name: size for name, size in each.parts.items() if not (apart and name.startswith(HOST))}
        for each in costs.timelines(job, stage)
    )
    return max(every, key=lambda parts: sum(parts.values()))


def verdict(parts: dict[str, int], limit: int) -> str:
    """Return the first part with which the sum exceeds the limit, in words."""
    before = 0
    for name, size in parts.items():
        if before + size > limit:
            beside = f" beside the {as_bytes(before)} of the parts before" if before else ""
            return f"{name} ({as_bytes(size)}) exceed it{beside}"
        before += size
    return (
        "all of this fits; not counted are buffers of the network, fragments of free memory, and "
        "other programs"
    )


def changes(job: Job, stage: int, limit: int) -> list[tuple[str, int]]:
    """Return changes that lower the count, with the bytes; the lowest first."""
    now = sum(counted(job, stage).values())
    found = [first_that_fits(alike, stage, limit) for alike in alternatives(job)]
    return sorted([each for each in found if each[1] < now], key=lambda each: each[1])


def first_that_fits(alike: list[tuple[str, Job]], stage: int, limit: int) -> tuple[str, int]:
    """Return the first of several changes whose bytes fit, or the last, with its bytes."""
    found = ("", 0)
    for words, job in alike:
        found = (words, sum(counted(job, stage).values()))
        if found[1] <= limit:
            break
    return found


def alternatives(job: Job) -> Iterator[list[tuple[str, Job]]]:
    """Yield lists of jobs that differ from this one in one setting; the first that fits is the one
    to propose."""
    run = job.run

    def changed(**settings: Any) -> Job:
        return replace(job, run=replace(run, **settings))

    if sizes := list(smaller_micro_batches(job)):
        yield [(f"micro_batch_tokens={n}", changed(micro_batch_tokens=n)) for n in sizes]
    if run.recompute != "block":
        yield [("recompute=block", changed(recompute="block"))]
    names = {each.name for each in fields(run.engine)}
    for key, value in ENGINE_CHANGES:
        if key in names and getattr(run.engine, key) != value:
            with contextlib.suppress(LayoutError, ValueError):  # the settings may exclude it
                engine = replace(run.engine, **{key: value})  # type: ignore[arg-type]
                engine.check(run.layout, job.processes, job.precision)
                yield [(f"engine.{key}={value}".lower(), changed(engine=engine))]
    layout = replace(run.layout, cp=2 * run.layout.cp)
    lengths = [phase.seq_len for phase in job.plan.phases]
    if not any(problems(layout, job.processes, job.model, lengths)):
        yield [(f"layout.cp={layout.cp}", changed(layout=layout))]


def smaller_micro_batches(job: Job) -> Iterator[int]:
    """Yield half of the tokens of a micro-batch, a quarter, …, down to one row."""
    tokens, cp = job.run.micro_batch_tokens, job.run.layout.cp

    def most_rows(tokens: int) -> int:
        return max(micro_rows(tokens, phase, job.dp, cp) for phase in job.plan.phases)

    while tokens > 1 and most_rows(tokens) > 1:
        tokens //= 2
        yield tokens
