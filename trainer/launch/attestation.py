"""Attest a run's fused kernels before its first step on a GPU: values beside their twins'.

    with attesting(job, parallel, beat, compiled) as settle:  a file is read, or workers begin
        …                                                     weights are loaded
        outcome = settle()                                    one rank's verdict is every rank's

The first rank of those with equal device, driver, compiler and kernels attests for them. A kernel
that fails stops the run; with `kernels.fallback: true` plain torch takes its place on all ranks.
Workers are separate processes: an illegal access is a verdict, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...console.errors import LayoutError
from ...console.log import get_logger
from ...dataplane.runlog import writer as lines
from ...models.accounting.shape import Shape
from ...models.accounting.state import Degrees
from ...models.attestation.attest import MAX_WORKERS, Attestation
from ...models.attestation.calls import Call, attention_calls, model_calls, trace_calls
from ...models.attestation.cases.attention import ATTENTION
from ...models.attestation.plan import AttestationPlan
from ...models.attestation.record import Record, compute_key, describe_machine, make_record
from ...models.attestation.trials import Verdict
from ...models.kernels import choice
from ...models.layers.attention.limits import find_unsupported
from ..cluster.agreement import broadcast_first, run_on_first
from ..folders.folder import ATTESTED
from ..layout.groups import Parallel
from ..run.job import Job
from ..run.process import remaining_order
from . import attestation_file

SHOWN = 4
"""Kernels that an error lists."""

log = get_logger(__name__)


@dataclass(frozen=True)
class AttestationOutcome:
    """The verdict that all ranks share."""

    where: Sequence[str]
    """Devices and compilers."""
    digest: str
    kernels: Sequence[str]
    """Kernels that passed."""
    failed: dict[str, str]
    """Kernels that plain torch replaces, and why."""
    seconds: float
    """Longest attestation; 0 if all were read from files."""

    def record(self, job: Job) -> None:
        """Say what was attested, what plain torch replaces, and whether the last start had another
        digest. Note the digest in run.yaml."""
        for kernel, problem in self.failed.items():
            log.warning("the kernel %s failed, plain torch takes its place: %s", kernel, problem)
        log.info("%s", self)
        earlier = [entry for entry in lines.read(job.folder.events) if entry["event"] == ATTESTED]
        if earlier and earlier[-1]["digest"] != self.digest:
            log.warning(
                "the last start had other kernels, or another device or compiler: %s (%s)",
                earlier[-1]["what"],
                earlier[-1]["digest"],
            )
        job.save_note(str(self))

    def __str__(self) -> str:
        return f"{self.summary} ({self.digest})"

    @property
    def summary(self) -> str:
        return f"kernels attested on {' and '.join(self.where)}"

    def details(self) -> dict[str, Any]:
        """Return the details of an event."""
        return {
            "what": self.summary,
            "digest": self.digest,
            "kernels": list(self.kernels),
            "failed": list(self.failed),
            "seconds": self.seconds,
        }


class Pending:
    """An attestation that may still run."""

    def __init__(
        self,
        job: Job,
        parallel: Parallel,
        plan: AttestationPlan,
        beat: Callable[[str], None],
        compiled: Callable[[], bool],
    ):
        self.job, self.parallel, self.plan = job, parallel, plan
        self.machine = describe_machine(str(parallel.device))
        self.key = compute_key(self.machine, plan)
        self.record: Record | None = None
        self.seconds = 0.0
        """Seconds that this rank attested; 0 if a file was read."""
        self.workers: Attestation | None = None
        self.failure: Exception | None = None
        keys = _gather(self.key, parallel)
        self.attests = keys.index(self.key) == parallel.rank
        self._beat, self._waits = beat, False
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, args=[compiled], daemon=True)
        if self.attests:
            self.record = attestation_file.load(self.key)
            if self.record is None:
                self._thread.start()

    def settle(self) -> AttestationOutcome:
        """Wait for the verdicts of all ranks, and act on them: raise, or let plain torch replace
        the kernels that failed. Collective."""
        self._waits = True
        self._beat("attesting the kernels")
        if self._thread.ident is not None:
            self._thread.join()
        if self.failure is not None:
            raise self.failure
        mine = (self.record, self.seconds) if self.attests else None
        gathered = [pair for pair in _gather(mine, self.parallel) if pair is not None]
        records = [record for record, _ in gathered]
        outcome = _join(records, max(seconds for _, seconds in gathered))
        if outcome.failed:
            self._replace(outcome, records)
        return outcome

    def close(self) -> None:
        with self._lock:
            self._closed = True
            workers = self.workers
        if workers is not None:
            workers.close()

    def _run(self, compiled: Callable[[], bool]) -> None:
        try:
            self._attest(compiled)
        except Exception as error:  # of this thread: `settle` raises it
            self.failure = error

    def _attest(self, compiled: Callable[[], bool]) -> None:
        """Attest the kernels once they are compiled, and keep the record if all are right."""
        if not compiled():
            return
        began = time.monotonic()
        with self._lock:
            if self._closed:
                return
            self.workers = Attestation(
                self.plan,
                str(self.parallel.device),
                num_workers=min(max(1, self.job.threads), MAX_WORKERS),
                report=self._report,
            )
        verdicts = self.workers.verdicts()
        self.seconds = time.monotonic() - began
        self.record = make_record(self.machine, self.plan, verdicts, self.seconds)
        if not self.record.problems:
            attestation_file.save(self.key, self.record)

    def _replace(self, outcome: AttestationOutcome, records: Sequence[Record]) -> None:
        """Let plain torch replace the kernels that failed, or raise."""
        run = self.job.run
        if not run.kernels.fallback:
            raise LayoutError(
                f"{_count(outcome.failed)} failed on {' and '.join(outcome.where)}, torch "
                f"{records[0].machine['torch']}:{_listed(outcome.failed)}",
                hint=_hint(outcome.failed),
            )
        choice.FAILED.update(outcome.failed)
        self._check_attention()
        for shape in shapes(self.job):
            trace_calls(self.job.model, shape, run.z_loss)  # raises if the model names one

    def _check_attention(self) -> None:
        """Raise if the implementations of attention that have not failed leave out a call."""
        order = remaining_order(self.job.run)
        problem = find_unsupported(order, self.plan.attention)
        if problem is not None:
            failed = ", ".join(name for name in self.job.run.kernels.attention if name not in order)
            raise LayoutError(
                f"kernels.attention without {failed}: {problem}",
                hint="add efficient or math to kernels.attention",
            )

    def _report(self, verdict: Verdict, count: int, total: int) -> None:
        if self._waits:  # until then, other beats say what the rank does
            self._beat(f"attesting the kernels, {count} of {total}: {verdict.kernel}")


def begin(
    job: Job, parallel: Parallel, beat: Callable[[str], None], compiled: Callable[[], bool]
) -> Pending | None:
    """Begin to attest the kernels of the model; None where no kernel runs. Collective."""
    if parallel.device.type != "cuda" and not choice.INTERPRETED:
        return None
    plan = broadcast_first(run_on_first(lambda: make_plan(job), parallel.control), parallel.control)
    assert plan is not None
    return Pending(job, parallel, plan, beat, compiled) if plan.subjects() else None


def make_plan(job: Job) -> AttestationPlan:
    """Return what is compared: the calls of the model, for each length of rows."""
    calls: list[Call] = []
    for shape in shapes(job):
        calls += [c for c in model_calls(job.model, shape, job.run.z_loss) if c not in calls]
    longest = max(shape.seq_len // shape.degrees.cp for shape in shapes(job))
    run, on_gpu = job.run, not choice.INTERPRETED
    return AttestationPlan(
        calls=calls,
        longest=longest,
        attention=attention_calls(job.model, job.precision) if on_gpu else [],
        order=list(run.kernels.order(deterministic=run.deterministic)),
        deterministic=run.deterministic,
        next_programs=run.kernels.next_programs(),
        tiny=not on_gpu,
    )


@contextlib.contextmanager
def attesting(
    job: Job, parallel: Parallel, beat: Callable[[str], None], compiled: Callable[[], bool]
) -> Iterator[Callable[[], AttestationOutcome | None]]:
    """Attest the kernels beside the block, which calls the yielded function for the outcome: None
    where no kernel runs. `compiled` waits for the programs in a thread. Collective."""
    pending = begin(job, parallel, beat, compiled)
    try:
        yield lambda: None if pending is None else pending.settle()
    finally:
        if pending is not None:
            pending.close()


def shapes(job: Job) -> list[Shape]:
    """Return a micro-batch of one row for each length of rows."""
    layout, device = job.run.layout, job.run.device
    assert device != "auto"
    lengths = {phase.seq_len for phase in job.plan.phases} | {*filter(None, job.plan.lengths)}
    if job.run.evaluate is not None and job.run.evaluate.seq_len is not None:
        lengths.add(job.run.evaluate.seq_len)
    return [
        Shape(
            rows=1,
            seq_len=length,
            precision=job.precision,
            device=device,
            degrees=Degrees(tp=layout.tp, cp=layout.cp, ep=layout.ep),
            **layout.row_forms,
        )
        for length in sorted(lengths)
    ]


def _gather(value: Any, parallel: Parallel) -> list[Any]:
    values = [None] * dist.get_world_size(parallel.control)
    dist.all_gather_object(values, value, parallel.control)
    return values


def _join(records: Sequence[Record], seconds: float) -> AttestationOutcome:
    """Return the outcome of all ranks: a kernel that fails on one has failed."""
    failed: dict[str, str] = {}
    for record in records:
        for kernel, problem in record.problems.items():
            failed.setdefault(kernel, problem)
    kernels = {verdict.kernel for record in records for verdict in record.verdicts}
    digests = sorted({record.digest for record in records})
    return AttestationOutcome(
        where=sorted({record.where for record in records}),
        digest=" ".join(digests),
        kernels=sorted(kernels - set(failed)),
        failed=failed,
        seconds=round(seconds, 1),
    )


def _hint(failed: Mapping[str, str]) -> str:
    attention = [name.removesuffix(ATTENTION) for name in failed if name.endswith(ATTENTION)]
    if len(attention) == len(failed):
        return (
            f"leave {' and '.join(attention)} out of kernels.attention, or set "
            "kernels.fallback=true, which does that"
        )
    return (
        "set kernels.fallback=true in the run, or `kernel: torch` in the model: both take plain "
        "torch; another version of Triton may compile it rightly. `headrace doctor --kernels` "
        "compares all kernels"
    )


def _count(failed: dict[str, str]) -> str:
    return f"the kernel {next(iter(failed))}" if len(failed) == 1 else f"{len(failed)} kernels"


def _listed(failed: dict[str, str]) -> str:
    lines = [f"{kernel}: {problem}" for kernel, problem in failed.items()]
    lines = [*lines[:SHOWN], *[f"and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)]
    return "".join(f"\n    {line}" for line in lines)
