"""A process that examines cases on a device: an illegal access ends this process alone.

The first line on stdin has plan and device, every further line the number of a subject. For each
number, a line on stdout has the verdict.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict

import torch

from ..kernels import choice
from .plan import AttestationPlan, Subject
from .trials import Verdict, examine


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a compiler may write to stdout
    header = json.loads(sys.stdin.readline())
    plan, device = AttestationPlan.decode(header["plan"]), header["device"]
    choice.NEXT.update(plan.next_programs)
    subjects = plan.subjects()
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    for line in sys.stdin:
        verdict, usable = run_subject(subjects[int(line)], device)
        answers.write(json.dumps({"verdict": asdict(verdict), "usable": usable}) + "\n")
        answers.flush()
        if not usable:
            os._exit(1)


def run_subject(subject: Subject, device: str) -> tuple[Verdict, bool]:
    """Return the verdict, and False if this process can no longer use the device."""
    case, dtype, trials = subject
    try:
        return examine(case, dtype, device, trials), True
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".strip()[:2000]
        return Verdict(case.kernel, case.name, dtype, None, problem), _usable(device)


def _usable(device: str) -> bool:
    if device == "cpu":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception:  # CUDA keeps the error of an illegal access
        return False
    return True


def encode_header(plan: AttestationPlan, device: str) -> str:
    """Return the first line on stdin."""
    return json.dumps({"plan": plan.encode(), "device": device})


if __name__ == "__main__":
    main()
