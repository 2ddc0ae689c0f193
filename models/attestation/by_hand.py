"""`headrace doctor --kernels`: attest all kernels by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...console.errors import LayoutError, MisuseError
from ...console.progress import Progress, exact_count, format_duration
from ..kernels import KERNELS, NEXT, choice, faults
from ..layers.attention import flash4
from ..layers.attention.order import DEFAULT_ORDER
from .attest import Attestation
from .cases.attention import TABLE_CALLS
from .plan import AttestationPlan
from .record import Record, describe_machine, make_record
from .trials import BOUNDS, Verdict

INTERPRETER_DTYPE = "float32"
"""The interpreter computes on the bits of narrower dtypes."""


def attest_kernels(
    only: Sequence[str], *, interpret: bool, next_programs: bool = False
) -> list[Record]:
    """Attest the kernels on every kind of GPU in this machine, or in Triton's interpreter.
    `next_programs` attests the next programs of those that have some."""
    known = NEXT if next_programs else (*KERNELS, "fp8", *([] if interpret else ["attention"]))
    unknown = [name for name in only if name not in known]
    if unknown:
        raise MisuseError(
            f"no such kernel: {', '.join(unknown)}", hint=f"choose from {', '.join(known)}"
        )
    if next_programs:
        only = only or NEXT
    next_kernels = list(only) if next_programs else []
    if interpret:
        plan = AttestationPlan(
            kernels=list(only) or None,
            dtypes=[INTERPRETER_DTYPE],
            next_programs=next_kernels,
            tiny=True,
        )
        return [_attest(plan, "cpu")]
    if next_programs:
        plan = AttestationPlan(kernels=list(only), next_programs=next_kernels)
        return [_attest(plan, device) for device in _find_devices()]
    return [_attest(make_plan(only, device), device) for device in _find_devices()]


def make_plan(only: Sequence[str], device: str) -> AttestationPlan:
    """Return a plan with all kernels and attention on a device, or with those in `only`."""
    plan = AttestationPlan(kernels=list(only) or None)
    if only and "attention" not in only:
        return plan
    order = list(DEFAULT_ORDER)
    usable = flash4.installed() is not None and not (
        flash4.find_torch_problem()
        or flash4.find_capability_problem(torch.cuda.get_device_capability(device))
    )
    if usable:
        order[order.index("flash")] = "flash4"
    return replace(plan, attention=list(TABLE_CALLS), order=order)


def _find_devices() -> list[str]:
    """Return a device for every kind of GPU; raise if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = {torch.cuda.get_device_name(number): f"cuda:{number}" for number in range(count)}
    if not names:
        raise LayoutError(
            "this machine has no GPU that torch can use: no kernel was compared",
            hint="run it where the training will run; `--kernels --interpret` compares them at "
            "tiny sizes in Triton's interpreter, which says nothing of a compiler or a device",
        )
    for device in names.values():
        if problem := choice.find_device_problem(torch.device(device)):
            raise LayoutError(f"no kernel runs on {device}: {problem}")
    return list(names.values())


def _attest(plan: AttestationPlan, device: str) -> Record:
    began = time.monotonic()
    total = len(plan.subjects())
    with Progress("comparing kernels", total=total) as progress:
        attestation = Attestation(
            plan,
            device,
            environment={"TRITON_INTERPRET": "1"} if device == "cpu" else None,
            report=lambda verdict, count, total: progress.advance(),
        )
        try:
            verdicts = attestation.verdicts()
        finally:
            attestation.close()
    return make_record(describe_machine(device), plan, verdicts, time.monotonic() - began)


def summarize(record: Record) -> dict[str, Any]:
    """Return a record for --json."""
    known = {f"{kernel} {_name(dtype)}": why for (kernel, dtype), why in choice.FAULTY.items()}
    return {
        "ok": not record.problems,
        "digest": record.digest,
        **record.pack(),
        "known_faults": known,
    }


def render(record: Record) -> str:
    """Return a table with the largest errors by kernel and dtype, then the problems."""
    dtypes = list(dict.fromkeys(verdict.dtype for verdict in record.verdicts))
    by_kernel: dict[str, list[Verdict]] = {}
    for verdict in record.verdicts:
        by_kernel.setdefault(verdict.kernel, []).append(verdict)
    rows = [
        ["kernel", "cases", *dtypes],
        *(
            [kernel, str(len({v.case for v in verdicts})), *_cells(kernel, verdicts, dtypes)]
            for kernel, verdicts in by_kernel.items()
        ),
        ["bound", "", *(f"{BOUNDS[dtype]:g}" for dtype in dtypes)],
    ]
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines = [
        "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *_problems(record), _conclusion(record)])


def _cells(kernel: str, verdicts: Sequence[Verdict], dtypes: Sequence[str]) -> Iterator[str]:
    for dtype in dtypes:
        column = [verdict for verdict in verdicts if verdict.dtype == dtype]
        if (kernel, getattr(torch, dtype)) in choice.FAULTY:
            yield "known fault"
        elif not column:  # attention in fp32
            yield "-"
        elif not all(verdict.passed for verdict in column):
            yield "FAILED"
        else:
            yield f"{max(verdict.error or 0.0 for verdict in column):.1e}"


def _problems(record: Record) -> Iterator[str]:
    for (kernel, dtype), why in choice.FAULTY.items():
        yield f"{kernel} in {_name(dtype)} runs as plain torch: {why}"
    for fault in faults.FAULTS:
        if fault.remedy is not None and choice.TRITON and fault.applies(choice.TRITON):
            yield f"{fault.kernel} runs in {fault.remedy}: a known fault of Triton {choice.TRITON}"
    for verdict in record.verdicts:
        if verdict.problem is not None:
            yield f"FAILED {verdict.kernel} [{verdict.case}] {verdict.dtype}: {verdict.problem}"


def _conclusion(record: Record) -> str:
    machine: Mapping[str, str] = record.machine
    where = f"{record.where}, torch {machine['torch']}"
    where += f", {machine['driver']}" * bool(machine["driver"])
    failed = len(record.problems)
    outcome = (
        f"{failed} kernel{'s' * (failed > 1)} failed"
        if failed
        else f"{exact_count(len(record.verdicts), 'cases')} passed, each twice with equal bits"
    )
    return f"{outcome} on {where}, in {format_duration(record.seconds)} ({record.digest})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
