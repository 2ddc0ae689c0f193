"""Negative controls: faults planted in a program, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PLANTED = """
import importlib.util, itertools, json, sys, tempfile
from pathlib import Path
from headrace.models.attestation.calls import Call
from headrace.models.attestation.plan import AttestationPlan
from headrace.models.attestation.worker import run_subject
from headrace.models.kernels import toeplitz
from headrace.models.kernels.programs import toeplitz as programs

STORE = "tl.store(out + out_offsets, y.to(dtype), mask=mask)"
FAULTS = {
    "none": (STORE, STORE),
    "a tap": ("(lag < REACH)", "(lag < REACH) & (lag != 1)"),
    "a row of a tile": ("y.to(dtype), mask=mask)", "y.to(dtype), mask=mask & (time != 17))"),
    "a wrong row": ("y.to(dtype), mask", "(y + (time == 17) * y).to(dtype), mask"),
    "a random number": ("y.to(dtype), mask", "(y + 1e-6 * random()).to(dtype), mask"),
}
shapes = {"x": [1, 99, 48], "taps": [1, 33], "skip": [16], "positions": [1, 99]}
dtypes = {"x": "float32", "taps": "float32", "skip": "float32", "positions": "int64"}
call = Call("toeplitz", shapes, dtypes, {"history": None, "gated": True})
plain, packed = AttestationPlan(calls=[call], longest=99, tiny=True).subjects()
problems = {}
for name, (text, fault) in FAULTS.items():
    source = Path(programs.__file__).read_text()
    assert text in source
    file = Path(tempfile.mkdtemp()) / "planted.py"
    file.write_text(source.replace(text, fault))
    spec = importlib.util.spec_from_file_location(programs.__name__ + "_planted", file)
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    planted.random = itertools.count(1).__next__
    toeplitz._programs = lambda: planted
    cases = [plain, packed] if name in ("none", "a wrong row") else [plain]
    problems[name] = [run_subject(case, "cpu")[0].problem for case in cases]
print(json.dumps(problems))
"""


def test_planted_faults_are_found() -> None:
    """A filter without a tap, a row of a tile that is not written or wrong, and a number, far
    below the bound, that differs from run to run."""
    done = subprocess.run(
        [sys.executable, "-c", PLANTED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout.splitlines()[-1])
    assert problems.pop("none") == [None, None]
    assert len(problems) == 4
    assert len(problems["a wrong row"]) == 2, "packed, too"
    for fault, case_problems in problems.items():
        for problem in case_problems:
            assert problem is not None, fault
            assert ("differs between two runs" in problem) == (fault == "a random number"), problem
    assert "output 0 is wrong by inf" in problems["a row of a tile"][0]
    assert "with 1 row of 65 tokens" in problems["a tap"][0]
