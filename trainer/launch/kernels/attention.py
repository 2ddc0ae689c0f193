"""Preflight checks of a run's order of attention implementations."""

from __future__ import annotations

from ....console.errors import LayoutError, MissingError
from ....models.layers.attention import flash4
from ....models.layers.attention.limits import AttentionCall, find_unsupported
from ....models.layers.attention.order import CPU_IMPLEMENTATIONS, DEFAULT_ORDER
from ...layout.devices import gpu_capabilities
from ...run.job import Job

DEFAULT = f"kernels.attention=[{', '.join(DEFAULT_ORDER)}]"


def check_attention(job: Job) -> None:
    """Raise if the order leaves out every implementation of the device, or of a call."""
    run = job.run
    named = f"kernels.attention is [{', '.join(run.kernels.attention)}]"
    if run.device == "cpu":
        if CPU_IMPLEMENTATIONS.isdisjoint(run.kernels.attention):
            raise LayoutError(
                f"{named}, and the CPU has {' and '.join(sorted(CPU_IMPLEMENTATIONS))}",
                hint="add one of them to kernels.attention",
            )
        return
    order = run.kernels.order(deterministic=run.deterministic)
    if not order:
        raise LayoutError(
            f"{named}, which is not deterministic, and the run asks for deterministic: true",
            hint="add flash to kernels.attention",
        )
    problem = find_unsupported(order, _calls(job))
    if problem is not None:
        raise LayoutError(f"{named}, and {problem}", hint=DEFAULT)


def check_flash4(job: Job) -> None:
    """Raise if the order names flash4, and this machine cannot run it."""
    run = job.run
    if run.device == "cpu" or "flash4" not in run.kernels.attention:
        return
    if flash4.installed() is None:
        raise MissingError(
            f"kernels.attention names flash4, and {flash4.PACKAGE} is not installed",
            hint=flash4.INSTALL,
        )
    problem = flash4.find_torch_problem()
    order = run.kernels.order(deterministic=run.deterministic)
    for capability in gpu_capabilities() if problem is None else ():
        problem = problem or (
            flash4.find_capability_problem(capability)
            or find_unsupported(order, _calls(job), capability)
        )
    if problem is not None:
        raise LayoutError(f"kernels.attention names flash4, and {problem}", hint=DEFAULT)


def _calls(job: Job) -> list[AttentionCall]:
    from ....models.attestation.calls import attention_calls

    return attention_calls(job.model, job.precision)
