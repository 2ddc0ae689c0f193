"""Known faults of compilers: kernels that a version of Triton compiles wrongly.

The table decides before any launch: such a kernel runs in a form that the fault does not touch, or
not at all, and its twin does. `models/attestation/` finds the faults that nobody knows yet.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Fault:
    kernel: str
    first: tuple[int, int]
    """First version of Triton with the fault."""
    mended: tuple[int, int]
    """First version without it."""
    dtypes: tuple[torch.dtype, ...]
    symptom: str
    evidence: str
    """What was seen of which version."""
    remedy: str | None = None
    """Form of the kernel that the fault does not touch; None: there is none."""

    def applies(self, version: str) -> bool:
        major, minor = version.split(".")[:2]
        return self.first <= (int(major), int(minor)) < self.mended


FAULTS = (
    Fault(
        "toeplitz",
        first=(3, 6),
        mended=(3, 8),
        dtypes=(torch.bfloat16, torch.float16),
        symptom="wrong values, others at each run, and illegal accesses",
        evidence="3.6 on an H100, where it was right in blocks of 32, and right from the binaries "
        "of 3.9. 3.7 cuts the addresses of shared memory to 14 bits as 3.6 does, 3.8 to 15 as 3.9",
        # A loop that is never taken as a constant would do, too, with 13 to 28% more instructions
        # for one turn (sm_90, Triton 3.9).
        remedy="blocks of 32 tokens",
    ),
)


def installed() -> str | None:
    """Return the version of Triton, or None."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def has_remedy(kernel: str, dtype: torch.dtype, version: str | None) -> bool:
    """Return True if the kernel must take the form of its remedy with this version of Triton."""
    return any(
        fault.kernel == kernel and dtype in fault.dtypes and fault.remedy is not None
        for fault in _known(version)
    )


def excluded(
    version: str | None, faults: Sequence[Fault] = FAULTS
) -> dict[tuple[str, torch.dtype], str]:
    """Return, by kernel and dtype, why a kernel must not run with this version of Triton."""
    return {
        (fault.kernel, dtype): f"Triton {version} compiles it wrongly: {fault.symptom} "
        f"({fault.evidence})"
        for fault in _known(version, faults)
        if fault.remedy is None
        for dtype in fault.dtypes
    }


def _known(version: str | None, faults: Sequence[Fault] = FAULTS) -> list[Fault]:
    return [fault for fault in faults if version is not None and fault.applies(version)]
