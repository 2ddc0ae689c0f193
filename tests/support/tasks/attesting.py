"""Ranks that attest the kernels of a run on a stand-in for a device."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.tasks.agreeing import make_job

from headrace.console.errors import UserError
from headrace.models.attestation.trials import Verdict
from headrace.models.kernels import choice
from headrace.trainer.launch import attestation
from headrace.trainer.run.process import remaining_order

MACHINE = {"driver": "580", "triton": "3.9.0", "torch": "2.15.0", "assembler": "", "cudnn": "92400",
           "flash4": "None", "sources": "5d"}  # fmt: skip


class Workers:
    """Stand-in for the workers: a verdict on each case, by kernel."""

    started = 0

    def __init__(self, plan: Any, device: str, problems: dict[str, str], **_: Any) -> None:
        type(self).started += 1
        self.plan, self.problems, self.closed = plan, problems, False

    def verdicts(self) -> list[Verdict]:
        return [
            Verdict(case.kernel, case.name, dtype, 1e-3, self.problems.get(case.kernel))
            for case, dtype, _ in self.plan.subjects()
        ]

    def close(self) -> None:
        self.closed = True


def attest(
    folder: Path,
    words: list[str],
    devices: list[str],
    problems: list[dict[str, str]] | None = None,
) -> dict[str, Any] | str:
    """Return the outcome on this rank, or its error. `devices` and the `problems` of kernels are
    by rank."""
    rank = dist.get_rank()
    Workers.started = 0
    job = make_job(folder / "run", [*words, "precision=bf16"])
    job = SimpleNamespace(**{name: getattr(job, name) for name in ("model", "plan", "precision")},
                          threads=1, run=_on_gpu(job.run))  # fmt: skip
    parallel = SimpleNamespace(
        rank=rank, device=torch.device("cuda", rank), control=dist.group.WORLD, first=rank == 0
    )

    def start(plan: Any, device: str, **options: Any) -> Workers:
        return Workers(plan, device, problems[rank] if problems else {}, **options)

    with ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.object(attestation, "describe_machine", lambda _: _machine(devices[rank])))
        patch(mock.patch.object(attestation, "Attestation", start))
        patch(mock.patch.dict(choice.FAILED, clear=True))
        patch(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder)}))
        try:
            with attestation.attesting(job, parallel, str, lambda: True) as settle:  # type: ignore[arg-type]
                outcome = settle()
        except UserError as error:
            return str(error)
        assert outcome is not None
        return {
            **outcome.details(),
            "started": Workers.started,
            "replaced": dict(choice.FAILED),
            "order": list(remaining_order(job.run)),
        }


def _machine(device: str) -> dict[str, str]:
    return {"device": device, **MACHINE}


def _on_gpu(run: Any) -> Any:
    import dataclasses

    return dataclasses.replace(run, device="cuda")
