"""Facts about a start that must be equal on all ranks.

Every rank reads its own files and machine. Settings that change neither weights nor rows nor steps
are excluded: machines may differ in them.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from typing import Any

import torch

from ... import __version__
from ...console import config as reader
from ...console import sources
from ...models.kernels.choice import find_device_problem
from ...models.layers.attention import flash4
from ..layout.devices import local_device
from ..run.job import Job
from .options import StartOptions

LOCAL = ("data", "slurm", "threads")
"""Keys that may differ between machines: cache and read-ahead workers; the batch job, which has
begun. `threads` is compared as the number of threads on CPU."""
ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
)
"""Environment variables that change arithmetic."""


def collect_facts(job: Job, options: StartOptions) -> dict[str, Any]:
    """Return nested facts, whose dotted paths users know: `optimizer.lr`, `plan.hash`, …"""
    run = {key: value for key, value in reader.plain(job.run).items() if key not in LOCAL}
    if job.run.device == "cpu":  # the order of a sum depends on the number of threads
        run["threads"] = torch.get_num_threads()
    versions = {
        "headrace": __version__,
        "headrace sources": sources.digest(),
        "torch": torch.__version__,
    }
    versions |= {package: _version(package) for package in job.run.engine.packages}
    if job.run.device == "cuda":
        versions["triton"] = _version("triton")
        if "flash4" in job.run.kernels.attention:
            versions[flash4.PACKAGE] = _version(flash4.PACKAGE)
    assert job.run.device != "auto"
    return {
        **run,
        "model": reader.plain(job.model),
        "mixture": _without_urls(job.mixture),
        "plan": {
            "hash": job.plan.hash,
            "phases": {phase.name: _phase(phase) for phase in job.plan.phases},
        },
        "held_out": _held_out(job),
        "versions": versions,
        "kernels": find_device_problem(local_device(job.run.device)) or "fused",
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "environment": {variable: os.environ.get(variable) for variable in ENVIRONMENT},
        "start": {
            key: value
            for key, value in dataclasses.asdict(options).items()
            if key not in ("began", "debug")
        },
    }


def _without_urls(mixture: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a mixture without dataset URLs: mirrors are equal, and the plan's hash covers the
    contents."""
    if mixture is None:
        return None
    sources = {
        name: {key: value for key, value in source.items() if key != "data"}
        for name, source in mixture.get("sources", {}).items()
    }
    return {**mixture, "sources": sources}


def _phase(phase: Any) -> dict[str, Any]:
    """Return a phase without weights, which the plan's hash covers."""
    return {key: value for key, value in reader.plain(phase).items() if key != "stretches"}


def _held_out(job: Job) -> str | None:
    """Return the hash of the held-out rows' plan."""
    from ...dataplane.order.plan import Plan

    return None if job.run.evaluate is None else Plan.load(job.held_out).hash


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
