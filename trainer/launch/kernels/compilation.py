"""Compilation of a run's fused kernels before its first step on a GPU: the programs of a step, and
those of the attestation, side by side instead of one after the other while the step waits.

Ranks that share a cache (those of a node) share the work: the first of them compiles on all cores,
the others wait. A second start finds all programs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ....console.errors import MissingError, UserError
from ....console.log import get_logger
from ....console.machine import cores
from ....models.attestation.record import compute_key, describe_machine
from ....models.compilation import cache, tools
from ....models.compilation.compile import compile_programs, lacking
from ....models.compilation.worker import Compilation, Request
from ....models.kernels import choice
from ...layout.groups import Parallel
from ...run.job import Job
from .. import attestation, attestation_file

log = get_logger(__name__)


def compile_kernels(job: Job, parallel: Parallel, beat: Callable[[str], None]) -> None:
    """Compile the programs that the cache of this rank's node lacks. Collective."""
    if parallel.device.type != "cuda" or choice.INTERPRETED:
        return
    major, minor = torch.cuda.get_device_capability(parallel.device)
    arch = 10 * major + minor
    shared = (socket.gethostname(), str(cache.folder()), arch)
    sharing = _gather(shared, parallel)
    compilation: Compilation | None = None
    failure: MissingError | None = None
    beat("waiting for the programs of the kernels")
    if sharing.index(shared) == parallel.rank:
        beat("listing the programs of the kernels")
        try:
            compilation = compile_programs(
                _make_request(job, parallel, arch),
                lambda count, total: beat(f"compiling {count} of {total} programs"),
            )
            if compilation.programs and (problem := tools.find_launcher_problem()):
                failure = lacking(problem)
        except MissingError as error:
            failure = error
        except UserError as error:  # then each program is compiled at its first launch
            log.warning("%s", error.message)
    outcomes = _gather((compilation, failure), parallel)
    if errors := [error for _, error in outcomes if error is not None]:
        raise errors[0]
    if parallel.first:
        for of_node, _ in outcomes:
            if of_node is not None:
                _log(of_node)


def _make_request(job: Job, parallel: Parallel, arch: int) -> Request:
    tokens = job.run.micro_batch_tokens
    shapes = [
        replace(shape, rows=max(1, tokens // shape.seq_len)) for shape in attestation.shapes(job)
    ]
    plan = attestation.make_plan(job)
    machine = describe_machine(str(parallel.device))
    attested = attestation_file.locate(compute_key(machine, plan)).exists()
    return Request(
        config=job.model,
        shapes=shapes,
        arch=arch,
        processes=cores(),
        z_loss=job.run.z_loss,
        plan=None if attested else plan,
    )


def _log(compilation: Compilation) -> None:
    for remark in compilation.remarks():
        log.warning("%s", remark)
    if compilation.compiled:
        log.info("%s", compilation)


def _gather(value: Any, parallel: Parallel) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(parallel.control)
    dist.all_gather_object(values, value, parallel.control)
    return values
