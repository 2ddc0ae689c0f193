"""Ranks that compile the kernels of a run on a stand-in for a device."""

from __future__ import annotations

import dataclasses
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.tasks.agreeing import make_job

from headrace.console.errors import LayoutError, UserError
from headrace.models.compilation.worker import Compilation, Request
from headrace.trainer.launch import attestation, attestation_file
from headrace.trainer.launch.kernels import compilation


def compile_run(
    folder: Path,
    hosts: list[str],
    problem: str = "",
    *,
    device: str = "cuda",
    attested: bool = False,
) -> dict[str, Any] | str:
    """Return what this rank compiled and reported, or its error. `hosts` are by rank; the compiler
    has a `problem`: "crash", or what it lacks."""
    rank = dist.get_rank()
    job = make_job(folder / "run", ["precision=bf16", "micro_batch_tokens=4Ki"])
    run = dataclasses.replace(job.run, device="cuda")
    job = SimpleNamespace(model=job.model, plan=job.plan, precision=job.precision, run=run)  # type: ignore[assignment]
    parallel: Any = SimpleNamespace(
        rank=rank, device=torch.device(device, rank), control=dist.group.WORLD, first=rank == 0
    )
    requests: list[Request] = []
    beats: list[str] = []
    settles = threading.Event()
    remarks: list[str] = []

    def beat(text: str) -> None:
        beats.append(text)
        if text.startswith("waiting"):  # the model is built, and weights are loaded
            settles.set()

    def stand_in(request: Request, report: Any) -> Compilation:
        requests.append(request)
        assert settles.wait(60), "the start waits for the compiler"
        if problem == "crash":
            raise LayoutError("the programs of the model could not be compiled: killed")
        report(17, 23)
        return Compilation(cache="C", programs=23, compiled={"glu 2": 1.0}, damaged=["glu"])

    lack = problem if "; " in problem else None
    with ExitStack() as stack:
        for owner, name, value in (
            (compilation, "compile_programs", stand_in),
            (
                compilation.tools,
                "find_launcher_problem",
                lambda: lack,
            ),
            (compilation.socket, "gethostname", lambda: hosts[rank]),
            (compilation.log, "warning", lambda _, text: remarks.append(text)),
            (compilation, "describe_machine", lambda _: {"device": "H100"}),
            (torch.cuda, "get_device_capability", lambda _: (9, 0)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder)}))
        if attested:
            key = compilation.compute_key({"device": "H100"}, attestation.make_plan(job))
            path = attestation_file.locate(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        try:
            with compilation.compiling(job, parallel, beat) as pending:
                pending.settle()
        except UserError as error:
            return str(error)
    return {
        "arch": [request.arch for request in requests],
        "rows": [shape.rows for request in requests for shape in request.shapes],
        "attests": [request.plan is not None for request in requests],
        "beats": beats,
        "remarks": remarks,
    }
