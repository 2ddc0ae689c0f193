"""The record of an attestation: machine, plan, and a verdict for each case."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..kernels import choice
from ..layers.attention import flash4
from .plan import AttestationPlan
from .trials import Verdict

PACKAGE = Path(__file__).parents[1]
SOURCES = ("kernels", "layers", "attestation")
"""Folders with kernels, twins and cases."""
DRIVER = Path("/proc/driver/nvidia/version")
ASSEMBLER = "TRITON_PTXAS_PATH"
"""Environment variable that replaces Triton's assembler."""


def describe_machine(device: str) -> dict[str, str]:
    """Return everything on this machine that decides what a kernel computes."""
    facts = {
        "device": "Triton's interpreter",
        "driver": "",
        "triton": str(choice.TRITON),
        "torch": torch.__version__,
        "assembler": os.environ.get(ASSEMBLER, ""),
        "cudnn": str(torch.backends.cudnn.version()),
        "flash4": str(flash4.installed()),
        "sources": _digest_sources(),
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        facts["device"] = f"{properties.name}, compute {properties.major}.{properties.minor}"
        facts["driver"] = _driver()
    return facts


def _driver() -> str:
    """Return the versions of the driver, in its own words, and of CUDA."""
    driver = ""
    with contextlib.suppress(OSError):
        driver = DRIVER.read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    return f"{driver}, CUDA {torch.version.cuda}"


def _digest_sources() -> str:
    digest = hashlib.sha256()
    for file in sorted(file for folder in SOURCES for file in (PACKAGE / folder).rglob("*.py")):
        digest.update(f"{file.relative_to(PACKAGE).as_posix()}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def compute_key(machine: Mapping[str, str], plan: AttestationPlan) -> str:
    """Return the name under which an attestation is kept: starts with equal keys share it."""
    return _hash([machine, plan.encode()])


@dataclass(frozen=True)
class Record:
    """The outcome of an attestation."""

    machine: Mapping[str, str]
    plan: str
    """Digest of the plan."""
    verdicts: Sequence[Verdict]
    seconds: float

    @property
    def problems(self) -> dict[str, str]:
        """First problem by kernel, with its case."""
        problems: dict[str, str] = {}
        for verdict in self.verdicts:
            if verdict.problem is not None:
                problems.setdefault(verdict.kernel, f"[{verdict.case}] {verdict.problem}")
        return problems

    @cached_property
    def digest(self) -> str:
        """Hash over machine, plan and outcome, without the errors' digits."""
        outcome = [[v.kernel, v.case, v.dtype, v.passed] for v in self.verdicts]
        return _hash([self.machine, self.plan, outcome])

    @property
    def where(self) -> str:
        """The device and the compiler, for people."""
        return f"{self.machine['device'].partition(',')[0]}, Triton {self.machine['triton']}"

    def pack(self) -> dict[str, Any]:
        return {
            "machine": dict(self.machine),
            "plan": self.plan,
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "seconds": self.seconds,
        }

    @classmethod
    def unpack(cls, values: Mapping[str, Any]) -> Record:
        verdicts = [Verdict(**verdict) for verdict in values["verdicts"]]
        return cls(values["machine"], values["plan"], verdicts, values["seconds"])


def make_record(
    machine: Mapping[str, str], plan: AttestationPlan, verdicts: Sequence[Verdict], seconds: float
) -> Record:
    return Record(machine, _hash(plan.encode()), verdicts, round(seconds, 1))


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
