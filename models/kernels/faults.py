"""Known faults of compilers: kernels that a version of Triton compiles wrongly.

The table decides before any launch: such a kernel never runs, and its twin does. An entry says what
was seen on a device, and which versions nobody tried. `models/attestation/` finds the faults that
nobody knows yet.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
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

    def applies(self, triton: tuple[int, int]) -> bool:
        return self.first <= triton < self.mended


FAULTS = (
    Fault(
        "toeplitz",
        first=(3, 6),
        mended=(3, 9),
        dtypes=(torch.bfloat16, torch.float16),
        symptom="wrong values, others at each run, and illegal accesses, seen with 3.6 on an H100",
    ),
)


def reasons(version: str) -> Iterator[tuple[tuple[str, torch.dtype], str]]:
    """Yield kernel, dtype, and why it must not run with this version of Triton."""
    for fault in FAULTS:
        if fault.applies(_major_and_minor(version)):
            mended = ".".join(map(str, fault.mended))
            reason = (
                f"Triton {version} is known to compile it wrongly ({fault.symptom}); Triton "
                f"{mended} compiles it rightly"
            )
            for dtype in fault.dtypes:
                yield (fault.kernel, dtype), reason


def _major_and_minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def installed() -> str | None:
    """Return the version of Triton, or None."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
