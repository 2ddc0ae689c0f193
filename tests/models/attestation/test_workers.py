"""Workers that crash, hang, or lose their device cost their case a verdict, and no other."""

from __future__ import annotations

import sys

import pytest

from headrace.models.attestation import attest
from headrace.models.attestation.attest import Attestation
from headrace.models.attestation.cases.tokens import glu_cases
from headrace.models.attestation.plan import AttestationPlan

CASES = [case.name for case in glu_cases()]
WORKER = """
import json, os, signal, sys
assert json.loads(sys.stdin.readline())["device"] == "cpu"
for line in sys.stdin:
    case, dtype, problem = CASES[int(line)], "float32", None
    if case == "silu":
        print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if case == "relu":
        problem = "illegal access"
    verdict = {"kernel": "glu", "case": case, "dtype": dtype, "error": None, "problem": problem}
    print(json.dumps({"verdict": verdict, "usable": problem is None}), flush=True)
""".replace("CASES", repr(CASES))
"""A worker as its owner sees it, without torch."""


def test_a_worker_that_ends_gives_its_case_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attest, "COMMAND", [sys.executable, "-c", WORKER])
    counts: list[tuple[int, int]] = []
    attestation = Attestation(
        AttestationPlan(kernels=["glu"], dtypes=["float32"], tiny=True),
        "cpu",
        num_workers=1,
        report=lambda _, count, total: counts.append((count, total)),
    )
    verdicts = {verdict.case: verdict for verdict in attestation.verdicts()}
    problems = {case: verdict.problem for case, verdict in verdicts.items()}
    assert problems == {
        **dict.fromkeys(CASES),
        "silu": "its process ended with SIGSEGV: CUDA error: an illegal memory access",
        "relu": "illegal access",
    }
    assert counts == [(count, len(CASES)) for count in range(1, len(CASES) + 1)]
    assert all(worker.process is None for worker in attestation._workers)


def test_a_worker_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attest, "COMMAND", [sys.executable, "-c", "import time; time.sleep(99)"])
    plan = AttestationPlan(kernels=["routed_rows"], dtypes=["float32"], tiny=True)
    verdicts = Attestation(plan, "cpu", num_workers=2, timeout=0.5).verdicts()
    assert [verdict.problem for verdict in verdicts] == ["it did not end within 0.5 seconds"] * 2


def test_workers_end_with_the_attestation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attest, "COMMAND", [sys.executable, "-c", "input(); input()"])
    attestation = Attestation(
        AttestationPlan(kernels=["glu"], dtypes=["float32"], tiny=True), "cpu"
    )
    while not all(worker.process for worker in attestation._workers):
        pass
    processes = [worker.process for worker in attestation._workers]
    attestation.close()
    assert all(process is not None and process.poll() is not None for process in processes)
