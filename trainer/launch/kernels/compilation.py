"""Compilation of a run's fused kernels before its first step on a GPU: the programs of a step, and
those of the attestation, side by side instead of one after the other while the step waits.

    with compiling(job, parallel, beat) as compilation:    a process begins
        …                                                  the model is built, weights are loaded
        compilation.settle()                               one rank's error is every rank's

Ranks that share a cache (those of a node) share the work: the first of them compiles on all cores,
the others wait. A second start finds all programs.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ....console.errors import MissingError, RunError, UserError
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


class PendingCompilation:
    """A compilation that may still run, on the first rank of those that share a cache."""

    def __init__(self, parallel: Parallel, request: Request | None, beat: Callable[[str], None]):
        self.parallel, self._beat = parallel, beat
        self.outcome: Compilation | None = None
        self.failure: Exception | None = None
        self._settles = self._closed = False
        self._thread: threading.Thread | None = None
        if request is not None:
            self._thread = threading.Thread(target=self._compile, args=[request], daemon=True)
            self._thread.start()

    def wait(self) -> bool:
        """Wait for this rank's programs. Return False if no kernel can run."""
        if self._thread is not None:
            self._thread.join()
        return self.failure is None and not self._closed

    def settle(self) -> None:
        """Wait for the programs of all ranks; raise if Triton lacks what it needs. Collective."""
        if not _compiles(self.parallel):
            return
        self._settles = True
        self._beat("waiting for the programs of the kernels")
        self.wait()
        outcomes = _gather((self.outcome, self.failure), self.parallel)
        if errors := [error for _, error in outcomes if error is not None]:
            raise errors[0]
        if self.parallel.first:
            for of_node, _ in outcomes:
                if of_node is not None:
                    _log(of_node)

    def close(self) -> None:
        """Let the process end at its next program."""
        self._closed = True

    def _compile(self, request: Request) -> None:
        try:
            self.outcome = compile_programs(request, self._report)
            if self.outcome.programs and (problem := tools.find_launcher_problem()):
                self.failure = lacking(problem)
        except MissingError as error:
            self.failure = error
        except UserError as error:  # then each program is compiled at its first launch
            log.warning("%s", error.message)
        except _Closed:
            pass
        except Exception as error:  # of this thread: the ranks raise it
            self.failure = RunError(f"the kernels could not be compiled: {error!r}")

    def _report(self, count: int, total: int) -> None:
        if self._closed:
            raise _Closed
        if self._settles:  # until then, other beats say what the rank does
            self._beat(f"compiling {count} of {total} programs")


class _Closed(Exception):
    """The start has failed: nobody waits for the programs."""


@contextlib.contextmanager
def compiling(
    job: Job, parallel: Parallel, beat: Callable[[str], None]
) -> Iterator[PendingCompilation]:
    """Compile the programs that the cache of this node lacks, beside the block. Collective."""
    pending = PendingCompilation(parallel, _divide(job, parallel, beat), beat)
    try:
        yield pending
    finally:
        pending.close()


def _compiles(parallel: Parallel) -> bool:
    return parallel.device.type == "cuda" and not choice.INTERPRETED


def _divide(job: Job, parallel: Parallel, beat: Callable[[str], None]) -> Request | None:
    """Return what this rank compiles, if anything. Collective."""
    if not _compiles(parallel):
        return None
    major, minor = torch.cuda.get_device_capability(parallel.device)
    arch = 10 * major + minor
    shared = (socket.gethostname(), str(cache.folder()), arch)
    if _gather(shared, parallel).index(shared) != parallel.rank:
        return None
    beat("listing the kernels of the model")
    return _make_request(job, parallel, arch)


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
        next_programs=job.run.kernels.next_programs(),
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
